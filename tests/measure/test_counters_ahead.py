"""ncu and its worker are started ahead, wait without a GPU, are used once, and never outlive the tuner. No ncu runs here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile

import pytest
from fake_ncu import assert_counted, assert_nothing_left, processes, starts, until

from moetune.measure import counters_run, ncu, sweep_counters
from moetune.measure.counter_rights import Blocked
from moetune.measure.counter_ways import NCU, NCU_WORKER
from moetune.measure.counters_run import JOBS, LAUNCHES, WAKE
from moetune.measure.sweep_counters import SweepCounters
from moetune.outcome import Failed, FailureKind
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
PLANS = {tokens: LayerPlan(gate_up=CONFIG, down=CONFIG) for tokens in (1, 64)}
SHAPE = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
DEVICE = TARGETS["sm_90"]
# The real worker, as ncu would start it: in its own place, and as a child in another session.
EXEC = "os.execv(program[0], program)"
FORK = "sys.exit(subprocess.run(program, start_new_session=True).returncode)"
COUNTS = "wait()\ncount(5)"
TUNER = """
import sys, time
from moetune.measure import ncu
from moetune.measure.counter_ways import NCU
from moetune.measure.sweep_counters import SweepCounters
from moetune_kernels.device import TARGETS
from moetune_kernels.shape import MoEShape
ncu.blocked = lambda: None
reader = SweepCounters(MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2), 0, ways=(NCU,))
reader.prepare(TARGETS["sm_90"])
print("prepared", flush=True)
time.sleep(600)
"""


@pytest.fixture
def reader():
    made = SweepCounters(SHAPE, 0, ways=(NCU,))
    yield made
    made.close()


def read(reader, limit_s=30.0, make_room=lambda: None):
    return reader.read(PLANS, DEVICE, limit_s, make_room)


def has_worker(tmp_path):
    return any(NCU_WORKER.encode() in line for line in processes(tmp_path))


def test_what_was_started_ahead_is_woken_then_told_its_jobs_when_there_is_room(fake_ncu, reader, tmp_path):
    fake_ncu(COUNTS)
    reader.prepare(DEVICE)
    reader.prepare(DEVICE)  # a second call starts nothing
    assert until(lambda: starts(tmp_path) == 1)
    before = (tmp_path / "starts").read_text()
    seen = []

    def make_room():
        (folder,) = tmp_path.glob("moetune-counters-*")
        assert json.loads((folder / WAKE).read_text()) == {"device_index": 0}
        seen.append((folder / JOBS).exists())

    assert_counted(read(reader, make_room=make_room))
    assert seen == [False]
    assert (tmp_path / "starts").read_text() == before
    assert_nothing_left(tmp_path)
    assert_counted(read(reader))  # once more: it was used up, and another one is started
    assert starts(tmp_path) == 2


def test_without_a_preparation_one_is_started_with_its_jobs(fake_ncu, reader, tmp_path):
    fake_ncu("assert jobs.exists()\ncount(5)")
    assert_counted(read(reader))
    assert starts(tmp_path) == 1
    assert reader.read({}, DEVICE, 30.0, lambda: pytest.fail("nothing needs room")) == {}
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("body", [EXEC, FORK], ids=["exec", "fork"])
def test_a_worker_that_is_never_used_ends_with_its_reader(fake_ncu, reader, tmp_path, body):
    fake_ncu(body)
    reader.prepare(DEVICE)
    assert until(lambda: has_worker(tmp_path))
    reader.close()
    reader.close()
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("waits_s", [0.0, 4.0], ids=["while-it-loads", "while-it-waits"])
@pytest.mark.parametrize("body", [EXEC, FORK, "time.sleep(600)"], ids=["exec", "fork", "ncu-hangs"])
def test_a_killed_tuner_leaves_no_process_behind(fake_ncu, tmp_path, body, waits_s):
    fake_ncu(body)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with subprocess.Popen(
        [sys.executable, "-c", TUNER], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    ) as tuner:
        try:
            assert tuner.stdout.readline() == b"prepared\n"
            assert until(lambda: starts(tmp_path) == 1)
            assert not until(lambda: not processes(tmp_path), waits_s)
        finally:
            tuner.send_signal(signal.SIGKILL)
        tuner.wait()
        assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    "end", ["sys.exit(1)", "wait(); sys.exit(1)"], ids=["before-its-jobs-come", "as-its-jobs-come"]
)
def test_a_worker_that_ends_without_its_jobs_is_replaced(fake_ncu, reader, tmp_path, end):
    fake_ncu(f"if len(starts) == 1:\n    {end}\ncount(5)")
    reader.prepare(DEVICE)
    assert until(lambda: starts(tmp_path) == 1)
    if end == "sys.exit(1)":
        assert until(lambda: not processes(tmp_path))
    assert_counted(read(reader))
    assert starts(tmp_path) == 2
    assert_nothing_left(tmp_path)


def test_a_worker_that_failed_on_its_jobs_is_not_replaced(fake_ncu, reader, tmp_path):
    fake_ncu("wait()\nlaunches.touch()\nprint('CUDA out of memory', flush=True)\nsys.exit(1)")
    reader.prepare(DEVICE)
    (failed, _) = read(reader).values()
    assert failed == Failed(FailureKind.LAUNCH, "ncu ended with exit code 1 and no counters: CUDA out of memory")
    assert starts(tmp_path) == 1


def test_a_worker_waits_only_so_long_and_is_then_replaced(fake_ncu, reader, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_counters, "WAIT_LIMIT_S", 0.2)
    fake_ncu(f"if len(starts) == 1:\n    {EXEC}\ncount(5)")
    reader.prepare(DEVICE)
    assert until(lambda: has_worker(tmp_path))
    assert until(lambda: not processes(tmp_path)), "it goes on waiting"
    assert_counted(read(reader))
    assert starts(tmp_path) == 2


def test_one_that_does_not_even_begin_to_wait_is_ended_too(fake_ncu, reader, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_counters, "WAIT_LIMIT_S", 0.2)
    monkeypatch.setattr(sweep_counters, "COUNTERS_LIMIT_S", 3.0)  # enough for it to start
    monkeypatch.setattr(counters_run, "GRACE_S", 0.2)
    fake_ncu("if len(starts) == 1:\n    time.sleep(600)\ncount(5)")
    reader.prepare(DEVICE)
    assert until(lambda: starts(tmp_path) == 1)
    assert until(lambda: not processes(tmp_path))
    assert_counted(read(reader))  # its folder is gone, too


def test_one_that_hangs_over_its_jobs_is_stopped_at_the_limit(fake_ncu, reader, tmp_path):
    fake_ncu("wait()\nlaunches.touch()\ntime.sleep(600)")
    reader.prepare(DEVICE)
    assert until(lambda: starts(tmp_path) == 1)
    found = read(reader, limit_s=1.0)
    assert {outcome.kind for outcome in found.values()} == {FailureKind.TIMEOUT}
    assert_nothing_left(tmp_path)


def test_the_real_worker_takes_the_jobs_it_waited_for(fake_ncu, reader, tmp_path):
    """Without a GPU its first act is to say so; it must have taken them, or another would have been started."""
    fake_ncu(EXEC)
    reader.prepare(DEVICE)
    assert until(lambda: has_worker(tmp_path))
    found = read(reader)
    assert starts(tmp_path) == 1
    assert all(isinstance(outcome, Failed) for outcome in found.values())
    assert_nothing_left(tmp_path)


def test_where_counters_are_blocked_nothing_is_started(fake_ncu, reader, tmp_path, monkeypatch):
    fake_ncu(COUNTS)
    monkeypatch.setattr(ncu, "blocked", lambda: Blocked("no counters for you"))
    reader.prepare(DEVICE)
    assert not list(tmp_path.glob("moetune-counters-*"))
    assert {outcome.reason for outcome in read(reader).values()} == {"no counters for you"}
    assert starts(tmp_path) == 0


def test_a_folder_that_cannot_be_made_costs_the_counters_and_not_the_sweep(fake_ncu, reader, tmp_path, monkeypatch):
    fake_ncu(COUNTS)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    reader.prepare(DEVICE)
    found = read(reader)
    assert {outcome.reason for outcome in found.values()} == {"ncu could not be started: No such file or directory"}


@pytest.fixture(scope="module")
def worker():
    return pytest.importorskip("moetune.measure.counter_jobs")


def test_loading_starts_no_cuda_and_hashes_every_kernel(worker):
    import torch
    import triton

    from moetune_kernels.gate_up.gather import gate_up_gather_kernel

    worker.load()
    assert not torch.cuda.is_initialized()
    assert isinstance(gate_up_gather_kernel, triton.JITFunction)
    assert gate_up_gather_kernel.hash is not None


def test_a_waiting_worker_starts_cuda_once_when_woken_and_begins_when_its_jobs_appear(worker, tmp_path, monkeypatch):
    started = []
    turns = iter(
        [
            lambda: None,
            lambda: (tmp_path / WAKE).write_text('{"device_index": 3}'),
            lambda: None,
            lambda: None,
            lambda: (tmp_path / JOBS).write_text("{}"),
        ]
    )
    monkeypatch.setattr(worker, "start_cuda", lambda index, _: started.append(index))
    monkeypatch.setattr(worker.time, "sleep", lambda s: next(turns)())
    assert worker.wait_for(tmp_path / JOBS, 60.0, None)
    assert started == [3]
    assert next(turns, None) is None
    assert not (tmp_path / LAUNCHES).exists()


def test_a_waiting_worker_ends_when_its_folder_goes_or_its_time_is_up(worker, tmp_path):
    assert not worker.wait_for(tmp_path / "gone" / JOBS, 60.0, None)
    assert not worker.wait_for(tmp_path / JOBS, 0.0, None)
