"""The benchmark of both ways to count: what it prints of runs that are made up, and when it says that one failed."""

from __future__ import annotations

import json

import pytest
from counters import LOADING_S, agreement_of, main

from moetune.measure import counter_ways
from moetune.measure.counter_rights import Blocked
from moetune.measure.counters import CounterJob, KernelCounters
from moetune.measure.counters_run import Counted
from moetune.measure.ncu_csv import LaunchRow
from moetune.measure.parts import Part
from moetune.outcome import Failed, FailureKind
from moetune_kernels.shape import MoEShape
from tests.engine.conftest import FakeBackend
from tests.engine.test_tuning import sweep_on


@pytest.fixture(scope="module")
def table_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    table = sweep_on(FakeBackend(), folder, tokens=(8, 512)).table
    (path,) = folder.rglob(f"{table.shape.key}.json")
    return path


class Run:
    """A run that counts two launches per job: CUPTI half of what ncu does."""

    def __init__(self, plan, events, fails):
        self.plan, self.events, self.fails, self.request = plan, events, fails, None
        self.title = plan.way.title

    def start(self, limit_s, wait_s):
        self.events.append((self.title, "start"))

    def wake(self, index):
        self.events.append((self.title, "wake"))

    def tell(self, request):
        self.request = request

    def close(self):
        self.events.append((self.title, "close"))

    def finish(self, limit_s):
        if self.fails == self.title:
            return Failed(FailureKind.TIMEOUT, "it hangs")
        launches, rows = [], []
        for index, _ in enumerate(self.request["jobs"]):
            for kernel in ("g", "d"):
                launches.append({"job": index, "part": "gate_up", "kernel": kernel})
                value = 5.0 if self.title == "CUPTI" else 10.0
                rows.append(LaunchRow(kernel, dict.fromkeys(self.plan.names.values(), value), 1))
            launches.append({"job": index, "done": True})
        seconds = {"load": 3.0, "weights": 0.25, "flushes": 9.0, "cuptiRangeProfilerDecodeData": 9.0}
        lack = Failed(FailureKind.LAUNCH, "none")
        return Counted(title=self.title, launches=launches, rows=rows, lack=lack, seconds=seconds)


@pytest.fixture
def lines(gpu_here, monkeypatch, table_file, capsys):
    """Run the benchmark; return its exit code, the lines, and what happened in which order."""
    for module in ("counter_rights.forbidden", "ncu.blocked"):
        monkeypatch.setattr(f"moetune.measure.{module}", lambda: None)

    def lines(fails=None):
        events = []
        code = main([str(table_file)], open_run=lambda plan: Run(plan, events, fails), pause=events.append)
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()], events

    return lines


def test_each_way_runs_cold_and_ahead_and_the_last_line_compares_them(lines):
    code, (*runs, agreement), events = lines()
    assert code == 0
    assert [(run["way"], run["how"]) for run in runs] == [
        ("CUPTI", "cold"),
        ("CUPTI", "ahead"),
        ("ncu", "cold"),
        ("ncu", "ahead"),
    ]
    assert {(run["entries"], run["launches"]) for run in runs} == {(2, 4)}
    assert agreement["cupti_over_ncu"]["dram_bytes"] == {"least": 0.5, "median": 0.5, "most": 0.5, "launches": 4}
    assert events[:8] == [
        *(("CUPTI", "start"), ("CUPTI", "wake"), ("CUPTI", "close")),
        *(("CUPTI", "start"), LOADING_S, ("CUPTI", "wake"), ("CUPTI", "close")),
        ("ncu", "start"),
    ]


def test_what_no_phase_covers_is_the_end_and_loading_ahead_is_not_counted(lines):
    _, (cold, ahead, *_), _ = lines()
    assert cold["phases"]["end"] == pytest.approx(cold["seconds"] - 3.25, abs=0.01)
    assert ahead["phases"]["end"] == pytest.approx(ahead["seconds"] - 0.25, abs=0.01)
    assert cold["phases"]["cuptiRangeProfilerDecodeData"] == 9.0


def test_a_way_that_fails_is_a_line_with_its_reason_and_exit_code_1(lines):
    code, (*runs, agreement), _ = lines(fails="CUPTI")
    assert code == 1
    assert [run.get("failed") for run in runs] == ["it hangs", "it hangs", None, None]
    assert set(agreement["cupti_over_ncu"].values()) == {None}


def test_a_way_that_is_forbidden_is_a_line_too(lines, monkeypatch):
    monkeypatch.setattr(counter_ways.ncu, "blocked", lambda: Blocked("no ncu here"))
    code, (*runs, _), events = lines()
    assert code == 1
    assert [run.get("failed") for run in runs] == [None, None, "no ncu here", "no ncu here"]
    assert ("CUPTI", "start") in events
    assert ("ncu", "start") not in events


def test_only_the_same_kernels_are_compared():
    job = CounterJob(shape=MoEShape(hidden=128, inter=128, local_experts=2, top_k=1), tokens=1, plan=None)

    def by(**values):
        return {job: [KernelCounters(part=Part.DOWN, kernel=name, duration_ns=value) for name, value in values.items()]}

    assert agreement_of("duration_ns", by(a=2.0, b=9.0), by(a=1.0, c=1.0)) == {
        "least": 2.0,
        "median": 2.0,
        "most": 2.0,
        "launches": 1,
    }
    assert agreement_of("duration_ns", by(a=2.0), {job: Failed(FailureKind.LAUNCH, "no")}) is None
    assert agreement_of("dram_bytes", by(a=2.0), by(a=2.0)) is None
