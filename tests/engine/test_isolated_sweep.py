"""Whole sweeps on a GPU process that is made to die: the same winners, minus the guilty; and nothing left running."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.engine.budget import Budget
from moetune.engine.events import TokenFailed
from moetune.engine.session import Job, Ports, Session
from moetune.errors import RunError
from moetune.outcome import Failed, Stage, Subject
from moetune.store import Store
from moetune.strategies import Exhaustive
from moetune_kernels.config import Role
from moetune_kernels.heuristic import heuristic_plan

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))

import planted_gpu
from planted_gpu import SHAPE, Deed

TOKENS = (1, 64, 512)


class Journal:
    """Keeps what a store would keep."""

    def __init__(self):
        self.trials = []

    def record(self, trial):
        self.trials.append(trial)

    def record_bound(self, tokens, bound_us):
        pass

    def record_ceilings(self, bytes_per_s, flops):
        pass

    def failed(self):
        """Every choice that failed, and where."""
        return {(t.subject, t.tokens, t.choice) for t in self.trials if isinstance(t.outcome, Failed)}


def impatient(method, arguments, tokens):
    return 30.0 if method == "start" else 2.0


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Return a function that runs a session on a planted GPU and returns its result, its journal and its events."""
    monkeypatch.setattr("moetune.measure.gpu_respawn.PAUSE_S", 0.0)

    def sweep(name, *deeds):
        folder, seen, journal = tmp_path / name, [], Journal()
        folder.mkdir()
        backend = planted_gpu.open_backend(folder, *deeds, limits=impatient)
        ports = Ports(
            journal=journal,
            known={},
            strategy=InOrder,
            default_plan=lambda tokens: heuristic_plan(backend.shape, tokens, backend.device),
            write_table=lambda entries, _: folder / "table.json",
            emit=seen.append,
        )
        job = Job(tokens=TOKENS, budget=Budget(None), kernels=40, polish=8)
        try:
            return Session(backend, job, ports).run(), journal, seen
        finally:
            backend.close()
            assert planted_gpu.alive(folder) == []

    return sweep


class InOrder(Exhaustive):
    """Everything compiled in a fixed order: whoever fails, the others are tried all the same."""

    def __init__(self, terrain, seed=0):
        super().__init__(replace(terrain, reserve=()), seed)


def starts(tmp_path, name):
    return len(planted_gpu.read_diary(tmp_path / name, "start"))


def planted(result, journal, harmful):
    """Return deeds that hit winners and losers of a sweep: each ends its process, or merely fails when harmless."""
    kernels = {replace(entry.plan.config(role), smem_size=None) for entry in result.entries.values() for role in Role}
    losers = [t.choice for t in journal.trials if t.subject is Subject.DOWN and t.choice not in kernels and t.verified]
    winner = result.entries[64].plan.gate_up
    finalist = next(t.choice for t in journal.trials if t.subject is Subject.LAYER and t.tokens == 512)
    deeds = [
        Deed(what="abort", method="first_launch_us", target=replace(winner, smem_size=None)),
        Deed(what="sticky", method="first_launch_us", target=losers[0]),
        Deed(what="sleep", method="time_kernel", target=losers[1], times=1),
        Deed(what="kill", method="verify_kernel", target=losers[2], times=1),
        Deed(what="exit", method="time_layers", target=finalist),
        Deed(what="scribble", method="verify_layer", times=1),
        Deed(what="raise", method="time_routing", times=1),
    ]
    return deeds if harmful else [replace(deed, what="refuse") for deed in deeds]


def test_a_sweep_among_faults_ends_as_one_where_the_guilty_fail_and_harm_nobody(sweep, tmp_path):
    right, journal, _ = sweep("right")
    calm, calm_journal, _ = sweep("calm", *planted(right, journal, harmful=False))
    wild, wild_journal, _ = sweep("wild", *planted(right, journal, harmful=True))
    assert (starts(tmp_path, "right"), starts(tmp_path, "calm")) == (1, 1)
    assert starts(tmp_path, "wild") >= 1 + len(planted(right, journal, harmful=True))
    assert set(wild.entries) == set(TOKENS)
    assert wild.entries == calm.entries  # plans, times, baselines and bounds
    assert wild.entries[64] != right.entries[64]  # whose winner was one of the guilty
    assert wild_journal.failed() == calm_journal.failed() > journal.failed()
    assert wild.trials == calm.trials


def test_faults_of_losers_change_no_winner(sweep, tmp_path):
    right, journal, _ = sweep("right")
    _, _, sticky, asleep, killed, *_ = (None, *planted(right, journal, harmful=True))
    wild, wild_journal, _ = sweep("wild", sticky, asleep, killed)
    assert starts(tmp_path, "wild") > 3
    assert {tokens: entry.plan for tokens, entry in wild.entries.items()} == {
        tokens: entry.plan for tokens, entry in right.entries.items()
    }
    assert len(wild_journal.failed() - journal.failed()) >= 3


def test_a_count_that_cannot_be_opened_costs_that_count(sweep, tmp_path):
    right, _, _ = sweep("right")
    result, _, seen = sweep("wild", Deed(what="abort", method="open", target=512))
    assert set(result.entries) == {1, 64}
    assert [event.tokens for event in seen if isinstance(event, TokenFailed)] == [512]
    assert "SIGABRT" in next(event.reason for event in seen if isinstance(event, TokenFailed))
    assert result.entries[1].plan == right.entries[1].plan


def test_a_gpu_that_is_gone_ends_the_sweep_with_its_trials_kept(sweep):
    with pytest.raises(RunError, match="the GPU gives no more answers"):
        sweep("gone", Deed(what="abort", method="time_combine"), Deed(what="leave", method="start", spared=1))


STOPPED = """
import sys
from pathlib import Path
from moetune import tuning
from moetune.measure.gpu_name import Gpu
from planted_gpu import Deed, open_backend
from test_tuning import bed_of

folder, deed = Path(sys.argv[1]), Deed(what="sleep", method="time_combine", spared=1)
tuning._gpu_is_there = lambda: True
tuning.gpu_of = lambda index: Gpu(name="NVIDIA H200", index=index, uuid=None)
tuning._gpu_backend = lambda request, ahead: open_backend(folder, deed)
tuning._gpu_bed = lambda backend, request: bed_of(backend, folder)
sys.argv = ["moetune", *"sweep --hidden 1024 --inter 512 --experts 8 --top-k 2 --tokens 1,64,512".split()]
from moetune.cli.main import main
main()
"""


def sleeping_sweep(folder):
    """Start a sweep whose GPU process sleeps in its second combine, and wait until it does."""
    return planted_gpu.sleeping_sweep(STOPPED, folder, lambda: len(planted_gpu.read_diary(folder, "time_combine")) >= 2)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_a_stopped_sweep_leaves_a_whole_store_and_no_process(tmp_path, number, code):
    process = sleeping_sweep(tmp_path)
    started_s = time.monotonic()
    os.kill(process.pid, number)  # to the tuner alone: nobody else tells its GPU process
    said, _ = process.communicate(timeout=100)
    assert process.returncode == code, said
    assert time.monotonic() - started_s < 60.0  # what it asked for sleeps for an hour
    assert b"Traceback" not in said
    assert planted_gpu.alive(tmp_path) == []
    with Store(tmp_path / "trials.sqlite") as store:
        rows = store.rows(SHAPE)
    screened = {row.trial.tokens for row in rows if row.trial.stage is Stage.SCREEN}
    assert len(screened & set(TOKENS)) >= 2
    with closing(sqlite3.connect(tmp_path / "trials.sqlite")) as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
