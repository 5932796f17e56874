"""When memory is looked at, what of it is judged, and a whole run on a fake sweep and a fake GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import memory_growth
import pytest
from command import Stopwatch
from memory_growth import Look, growth_of, lines_of, looks_until, lowest, main
from processes import COMPILE, GPU, OTHER, TUNER, HostMemory
from stored import tried
from sweeps import Ended, Sweep

from moetune.errors import RunError, UsageError
from moetune_kernels.shape import MoEShape
from tests.benchmarks.conftest import CARD_BYTES, FakeNvml
from tests.engine.conftest import SHAPE, FakeBackend
from tests.engine.test_tuning import sweep_on

MB = 10**6


def held(tuner=300, gpu=3000, compiling=900, other=0, pss=True):
    sizes = {TUNER: tuner, GPU: gpu, COMPILE: compiling, OTHER: other}
    return {part: HostMemory(size * MB, size * MB // 2 if pss else None) for part, size in sizes.items()}


def look(candidates=100, host=None, gpu=5_000, pids=(7,)):
    return Look(candidates=candidates, host=host or held(), gpu=gpu * MB, gpu_pids=pids)


class Running:
    """A sweep that ends when it was waited for so often."""

    def __init__(self, waits=10**9, ended=None):
        self.waits, self.ended = waits, ended

    def wait(self, limit_s):
        self.waits -= 1
        return self.ended if self.waits < 0 else None


def looks_of(counts, wanted, sweep=None, clock=None):
    numbers = iter(counts)
    clock = clock or Stopwatch(60.0)
    found = looks_until(wanted, sweep or Running(), lambda: next(numbers), look, clock=clock, pause_s=0.0)
    return [one.candidates for one in found]


def test_every_hundred_is_looked_at_once_and_the_last_one_ends_it():
    assert looks_of([0, 99, 100, 130, 203, 290, 301, 999], 300) == [100, 203, 301]
    assert looks_of([50, 250, 251, 299, 300], 300) == [250, 300]  # two hundreds at once are one look


def test_a_sweep_that_ends_or_a_time_that_is_over_before_the_last_look_is_an_error():
    with pytest.raises(RunError, match="the GPU is gone after 150 of 300 candidates"):
        looks_of([100, 150, 150], 300, Running(1, Ended(3.0, 1, "the GPU is gone")))
    with pytest.raises(RunError, match="came to its end after 100 of 300"):
        looks_of([100, 100], 300, Running(0, Ended(3.0, 0, "")))
    with pytest.raises(RunError, match="the time was over after 100 of 300"):
        looks_of([100, 100], 300, clock=Stopwatch(0.0))


def test_a_sweep_that_ends_as_the_last_look_is_done_is_none():
    assert looks_of([100, 200], 200, Running(1, Ended(3.0, 0, ""))) == [100, 200]


def test_growth_is_of_the_parts_that_are_judged_with_shared_pages_once():
    grown = look(1000, held(tuner=310, gpu=3200, compiling=950, other=5000), gpu=5_700)
    growth = growth_of([look(), look(500), grown], CARD_BYTES)
    assert growth == {
        "host_bytes": 130 * MB,
        "host_measure": "pss",
        "gpu_bytes": 700 * MB,
        "gpu_share": pytest.approx(700 / 150_000),
        "met": True,
    }


def test_without_shares_resident_memory_is_judged_at_both_ends():
    grown = look(1000, held(tuner=310, gpu=3189))
    growth = growth_of([look(host=held(pss=False)), grown], CARD_BYTES)
    assert (growth["host_measure"], growth["host_bytes"], growth["met"]) == ("rss", 199 * MB, True)
    assert "199 MB (rss" in lines_of([look(), grown], growth)[-3]


@pytest.mark.parametrize(
    "grown",
    [look(1000, held(gpu=3400)), look(1000, gpu=6_500)],
    ids=["200 MB of the host", "1% of the GPU"],
)
def test_a_goal_is_missed_at_its_own_value(grown):
    growth = growth_of([look(), grown], CARD_BYTES)
    assert growth["met"] is False
    assert lines_of([look(), grown], growth)[-1] == "GOALS MISSED"


@pytest.mark.parametrize(
    ("last", "why"),
    [(look(1000, held(gpu=0), pids=()), "no GPU process was seen"), (look(1000, pids=(8,)), "was replaced")],
)
def test_growth_of_a_gpu_process_that_was_not_there_all_the_time_is_no_figure(last, why):
    with pytest.raises(RunError, match=why):
        growth_of([look(), last], CARD_BYTES)


def test_the_lowest_of_several_looks_is_taken_part_by_part():
    looks = [look(100, held(compiling=1400)), look(100, held(tuner=320), gpu=4_900)]
    assert lowest(looks) == replace(look(100), gpu=4_900 * MB)
    assert lowest([look(), look(host=held(pss=False))]).host[TUNER] == HostMemory(300 * MB, None)


def test_a_run_watches_a_sweep_ends_it_and_writes_what_it_saw(gpu_here, tmp_path, monkeypatch, capsys):
    worker = "import sys, time; time.sleep(60)"
    program = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}, 'moetune.measure.gpu_worker'])"
    )
    fake, sweeps = FakeNvml(used=10**9), []

    class FakeSweep(Sweep):
        def __init__(self, place, options):
            super().__init__(place, options, (*memory_growth.sys.executable.split("\n"), "-c", program))
            sweeps.append((self.process, options))

    counts = iter([0, 0, 0, 0, 0, 0, 0, 0, 100, 201])
    monkeypatch.setattr(memory_growth, "Sweep", FakeSweep)
    monkeypatch.setattr(memory_growth, "Nvml", lambda gpu: memory_growth_nvml(gpu, fake))
    monkeypatch.setattr(memory_growth, "tried", lambda store: next(counts))
    monkeypatch.setattr(memory_growth, "LOOK_PAUSE_S", 0.01)
    assert main([str(tmp_path / "out.json"), "--candidates", "200"]) == 0
    results = json.loads((tmp_path / "out.json").read_text())
    assert [one["candidates"] for one in results["looks"]] == [100, 201]
    assert results["looks"][1]["host"]["gpu"]["rss"] > MB
    assert results["growth"]["gpu_bytes"] == 0
    ((process, options),) = sweeps
    assert process.poll() is not None
    assert "exhaustive" in options
    assert capsys.readouterr().out.splitlines()[-1] == "goals met"


def memory_growth_nvml(gpu, fake):
    from gpu_watch import Nvml

    return Nvml(gpu, fake)


def test_fewer_candidates_than_two_looks_are_bad_usage(gpu_here, tmp_path):
    with pytest.raises(UsageError, match="--candidates must be at least 200, got 199"):
        main([str(tmp_path / "out.json"), "--candidates", "199"])


def test_the_sweep_that_is_watched_has_a_thousand_different_candidates_and_more(tmp_path):
    sizes = dict(zip(memory_growth.LAYER[::2], map(int, memory_growth.LAYER[1::2]), strict=True))
    assert (
        MoEShape(
            hidden=sizes["--hidden"],
            inter=sizes["--inter"],
            local_experts=sizes["--experts"],
            top_k=sizes["--top-k"],
        )
        == SHAPE
    )
    tokens = (sizes["--tokens"],)
    sweep_on(FakeBackend(), tmp_path, tokens=tokens, strategy=memory_growth.OPTIONS[-1], budget_s=None)
    assert tried(tmp_path / "trials.sqlite") > 1200
