"""Sweeps on two GPU processes at once: they share compilers and ceilings, one may be lost, and nothing is left running."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from moetune.engine.budget import Budget
from moetune.engine.events import TokenFailed, Warned
from moetune.engine.session import Job, Ports, Session
from moetune.errors import RunError
from moetune.outcome import Failed
from moetune.store import Store
from moetune.strategies import Guided
from moetune_kernels.config import Role
from moetune_kernels.heuristic import heuristic_plan

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))

import planted_gpu
from planted_gpu import DEVICE, SHAPE, Deed

from .conftest import MemoryJournal

TOKENS = (1, 16, 64, 256, 512, 2048)


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Return a function that runs a session on two planted GPUs and returns its result, its journal and its events."""
    monkeypatch.setattr("moetune.measure.gpu_respawn.PAUSE_S", 0.0)

    def sweep(*deeds):
        seen, journal = [], MemoryJournal()
        first = planted_gpu.open_backend(tmp_path, *deeds, device=DEVICE)
        ports = Ports(
            journal=journal,
            known={},
            strategy=Guided,
            default_plan=lambda tokens: heuristic_plan(SHAPE, tokens, DEVICE),
            write_table=lambda entries, _: tmp_path / "table.json",
            emit=seen.append,
        )
        job = Job(tokens=TOKENS, budget=Budget(None), kernels=40, polish=16)
        with closing(first), closing(first.beside(1, DEVICE)) as second:
            result = Session(first, job, ports, (second,), ("card 0", "card 1")).run()
        assert planted_gpu.alive(tmp_path) == []
        assert first._compiles.closed == 1  # by its owner alone
        return result, journal, seen

    return sweep


def by_device(folder, method):
    lines = planted_gpu.read_diary(folder, method)
    return [[line for line in lines if line["device"] == device] for device in (0, 1)]


def test_two_processes_share_ceilings_reports_and_counts(sweep, tmp_path):
    result, journal, _ = sweep()
    assert tuple(result.entries) == TOKENS
    assert [len(lines) for lines in by_device(tmp_path, "start")] == [1, 1]
    assert [len(lines) for lines in by_device(tmp_path, "ceilings")] == [1, 0]
    bounds = by_device(tmp_path, "bound_us")  # asserts in the process that it knows the ceilings
    assert sorted(line["tokens"] for lines in bounds for line in lines) == sorted(TOKENS)
    assert all(bounds)
    launches = by_device(tmp_path, "first_launch_us")
    assert all(launches)
    assert all(line["known"] >= 40 - 2 for lines in launches for line in lines[-1:])  # whoever asked for the compiles
    assert {trial.tokens for trial in journal.trials if trial.verified} >= set(TOKENS)


def test_a_candidate_that_ends_one_process_costs_neither_gpu(sweep, tmp_path):
    _, _, seen = sweep(Deed(what="abort", method="time_combine", times=2, spared=1))
    assert sum(len(lines) for lines in by_device(tmp_path, "start")) == 4
    assert not [event for event in seen if isinstance(event, (TokenFailed, Warned)) and "counters" not in str(event)]


@pytest.mark.parametrize("device", [0, 1])
def test_a_gpu_whose_processes_all_end_leaves_the_rest_to_the_other(sweep, tmp_path, device):
    dies = Deed(what="abort", method="time_routing", device=device, spared=0)
    gone = Deed(what="leave", method="start", device=device, spared=1)
    result, _, seen = sweep(dies, gone)
    assert tuple(result.entries) == TOKENS
    said = [event.text for event in seen if isinstance(event, Warned) and "leaves the sweep" in event.text]
    assert len(said) == 1
    assert said[0].startswith(f"card {device} leaves the sweep, 1 of 2 go on: the GPU gives no more answers")


def test_two_gpus_that_are_gone_end_the_sweep(sweep):
    with pytest.raises(RunError, match="the GPU gives no more answers"):
        sweep(Deed(what="abort", method="time_routing"), Deed(what="leave", method="start", spared=2))


def test_closing_ends_the_question_that_another_thread_has_put(tmp_path):
    backend = planted_gpu.open_backend(tmp_path, Deed(what="sleep", method="time_combine"), device=DEVICE)
    answers = []

    def ask():
        assert backend.open(16) is None
        answers.append(backend.time_combine())

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    deadline_s = time.monotonic() + 60
    while not planted_gpu.read_diary(tmp_path, "time_combine"):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    started_s = time.monotonic()
    backend.close()
    asking.join(60)
    assert time.monotonic() - started_s < 60
    assert isinstance(answers[0], Failed)
    assert planted_gpu.alive(tmp_path) == []
    with pytest.raises(RunError, match="the sweep ended"):
        backend.time_kernel(Role.DOWN, heuristic_plan(SHAPE, 16, DEVICE).down, 3)
    assert len(planted_gpu.read_diary(tmp_path, "start")) == 1


STOPPED = """
import sys
from pathlib import Path
from moetune import tuning
from moetune.engine import workers
from moetune.measure import gpu_choice
from moetune.measure.gpu_name import Gpu
from planted_gpu import DEVICE, Deed, open_backend
from test_tuning import bed_of

class Idle:
    def __init__(self, uuid): pass
    def others(self): return ()
    def busy_percent(self): return 0
    def close(self): pass

workers.PATIENCE_S = 120.0
folder = Path(sys.argv[1])
deeds = [Deed(what="sleep", method="time_combine", device=0), Deed(what="sleep", method="time_combine", device=1)]
tuning._gpu_is_there = lambda: True
tuning.lock_dirs = lambda: [folder / "locks"]
tuning.gpu_of = gpu_choice.gpu_of = lambda index: Gpu(name="NVIDIA H200", index=index, uuid=f"GPU-{index}")
gpu_choice.device_total, gpu_choice.driver_device, gpu_choice.Clocks = lambda: 2, lambda index: DEVICE, Idle
tuning._gpu_backend = lambda request, ahead: open_backend(folder, *deeds, device=DEVICE)
tuning._gpu_bed = lambda backend, request: (backend.begin(), bed_of(backend, folder))[1]
sys.argv = ["moetune", *"sweep --hidden 1024 --inter 512 --experts 8 --top-k 2 --tokens 1,64,512".split()]
from moetune.cli.main import main
main()
"""


def sleeping_sweep(folder):
    """Start a sweep of which both GPU processes sleep in a combine, and wait until they do."""
    return planted_gpu.sleeping_sweep(STOPPED, folder, lambda: all(by_device(folder, "time_combine")))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_a_stopped_sweep_on_two_gpus_leaves_a_whole_store_and_no_process(tmp_path, number, code):
    process = sleeping_sweep(tmp_path)
    started_s = time.monotonic()
    os.kill(process.pid, number)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == code, said
    assert time.monotonic() - started_s < 60.0  # less than what threads that hang are waited for
    assert b"Traceback" not in said
    assert planted_gpu.alive(tmp_path) == []
    with Store(tmp_path / "trials.sqlite") as store:
        (run,) = store.runs()
        rows = store.rows(SHAPE)
    assert run.gpu == "GPU-0,GPU-1"
    assert rows
    assert not [row for row in rows if isinstance(row.trial.outcome, Failed)]  # what was killed had done nothing wrong
