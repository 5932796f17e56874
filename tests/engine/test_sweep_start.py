"""A live sweep starts without torch in the tuner, and starts no process for what it refuses or replays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moetune import tuning
from moetune.errors import MissingError, MoetuneError
from moetune.measure.gpu_name import Gpu
from moetune_kernels.device import TARGETS
from moetune_kernels.errors import UnsupportedDeviceError
from moetune_kernels.shape import MoEShape, WeightFormat
from tests.engine.test_tuning import SHAPE, bed_of

LIVE = """
import json, sys
from pathlib import Path
import planted_gpu
from moetune import tuning
from moetune.engine.events import SweepStarted, Warned
from moetune.measure.gpu_name import Gpu

folder, told = Path(sys.argv[1]), []
heavy = lambda: [name for name in ("torch", "triton", "pandas", "matplotlib") if name in sys.modules]
found = {"imported": heavy(), "there": tuning._gpu_is_there(), "asked": heavy()}
tuning._gpu_is_there = lambda: True
tuning.gpu_of = lambda index: Gpu(name="NVIDIA H200", index=index, uuid=None)
tuning.lock_dirs = lambda: [folder / "locks"]
tuning.open_isolated = lambda settings, device, tokens, ahead: planted_gpu.open_backend(folder, device=planted_gpu.DEVICE)
request = tuning.SweepRequest(
    shape=planted_gpu.SHAPE, tokens=(1,), out_dir=folder / "tables", store_path=folder / "trials.sqlite", budget_s=60.0
)
result = tuning.sweep(request, told.append)
order = [type(event).__name__ for event in told if isinstance(event, (SweepStarted, Warned))]
print(json.dumps(found | {"swept": heavy(), "entries": list(result.table.entries), "order": order}))
"""


def python(code, *arguments):
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent / "measure"), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_whole_live_sweep_loads_no_torch_in_the_tuner(tmp_path):
    found = python(LIVE, tmp_path)
    assert (found["imported"], found["asked"], found["swept"]) == ([], [], [])
    assert found["entries"] == [1]
    assert found["order"][:2] == ["SweepStarted", "Warned"]  # the GPU is shared, which is told once it is known


def test_a_job_for_the_compile_pool_is_made_without_torch():
    code = """
import json, pickle, sys
from moetune.measure import kernel_compiles
from moetune.measure.kernel_jobs import SmallKernels, gemm_job
from moetune_kernels.config import Role
from moetune_kernels.device import TARGETS
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.shape import MoEShape
shape, device = MoEShape(hidden=1024, inter=512, local_experts=8, top_k=2), TARGETS["sm_90"]
jobs = [gemm_job(role, heuristic_plan(shape, 64, device).config(role), shape, device) for role in Role]
jobs.append(SmallKernels(shape=shape, device=device, tokens=(1, 16)))
print(json.dumps([len(pickle.dumps(jobs)) > 100, "torch" in sys.modules, "triton" in sys.modules]))
"""
    assert python(code) == [True, False, False]


@pytest.fixture
def starts(monkeypatch):
    """Count the backends that are opened; opening one fails."""
    opened = []

    def open_isolated(settings, device, tokens, ahead):
        opened.append(settings)
        raise AssertionError("a process was started")

    monkeypatch.setattr(tuning, "open_isolated", open_isolated)
    return opened


def test_a_replay_starts_no_process(starts, monkeypatch):
    monkeypatch.setattr(tuning, "_gpu_is_there", lambda: False)
    with pytest.raises(MissingError, match="no CUDA GPU here"):
        tuning.sweep(tuning.SweepRequest(shape=SHAPE, tokens=(1,)))
    assert starts == []


def no_device(index):
    raise UnsupportedDeviceError(f"no CUDA device {index}: the driver sees 1; run `moetune doctor`")


@pytest.mark.parametrize(
    ("shape", "device", "said"),
    [
        (replace(SHAPE, format=WeightFormat.FP8), lambda index: TARGETS["sm_90"], "fp8"),
        (SHAPE, lambda index: replace(TARGETS["sm_80"], smem_limit=1024), "shared memory"),
        (SHAPE, no_device, "no CUDA device 0: the driver sees 1"),
    ],
    ids=["a format that no kernel reads", "a device that no kernel runs on", "a device that is not there"],
)
def test_what_cannot_be_served_starts_no_process(starts, monkeypatch, shape: MoEShape, device, said):
    monkeypatch.setattr(tuning, "_gpu_is_there", lambda: True)
    monkeypatch.setattr(tuning, "driver_device", device)
    with pytest.raises(MoetuneError, match=said):
        tuning.sweep(tuning.SweepRequest(shape=shape, tokens=(1,)))
    assert starts == []


@pytest.mark.parametrize("part", ["gpu_of", "_gpu_bed", "lock_dirs"])
def test_what_fails_after_the_start_closes_the_backend(fake_backend, monkeypatch, tmp_path, part):
    def fail(*_):
        raise UnsupportedDeviceError("no")

    backend = fake_backend()
    monkeypatch.setattr(tuning, "_gpu_is_there", lambda: True)
    monkeypatch.setattr(tuning, "gpu_of", lambda index: Gpu(name="NVIDIA H200", index=index, uuid="GPU-1"))
    monkeypatch.setattr(tuning, "lock_dirs", lambda: [tmp_path / "locks"])
    monkeypatch.setattr(tuning, "_gpu_backend", lambda request, ahead: backend)
    monkeypatch.setattr(tuning, "_gpu_bed", lambda backend, request: bed_of(backend, tmp_path))
    monkeypatch.setattr(tuning, part, fail)
    with pytest.raises(UnsupportedDeviceError):
        tuning.sweep(tuning.SweepRequest(shape=SHAPE, tokens=(1,)))
    assert backend.calls["close"]
