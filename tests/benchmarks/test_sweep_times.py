"""Three sweeps of a fake GPU, each a process of its own: what is counted, averaged and printed, and what counts as failed."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import sweep_times
from gpu_watch import Mean
from sweep_times import Row, line_of, main, row_of, shown, stored_facts
from sweeps import Ended, Place, Sweep

from moetune.errors import RunError, UsageError
from tests.benchmarks.conftest import LIVE
from tests.benchmarks.live import KERNELS
from tests.benchmarks.test_stored import CONFIGS, screening

ENDED = Ended(9.0, 0, "")


class Watched:
    """A GPU that is half busy at all times, at one clock."""

    busy = sm_mhz = ()

    def __init__(self, begin_s=0.0, seconds=0):
        ticks = [begin_s + tick / 10 for tick in range(10 * seconds)]
        self.busy = [(at, 100.0 * (place % 2)) for place, at in enumerate(ticks)]
        self.sm_mhz = [(at, 1980.0) for at in ticks]

    how = "rates"


@pytest.fixture
def swept(gpu_here, monkeypatch, tmp_path):
    """Return a function that runs the benchmark on fake sweeps and returns its exit code and its JSON."""
    monkeypatch.setattr(sweep_times, "imported", lambda: 0.0)
    places = []

    def run(place, options, limit_s):
        places.append((place, list(options)))
        with Sweep(place, options, LIVE) as sweep:
            return sweep.wait(limit_s)

    def swept(*arguments):
        code = main([str(tmp_path / "out.json"), *arguments], run=run, watch=lambda: nullcontext(Watched()))
        return code, json.loads((tmp_path / "out.json").read_text())

    swept.places = places
    return swept


def test_cold_warm_and_again_differ_in_cache_and_store(swept, capsys):
    code, results = swept("--model", "qwen3-30b-a3b", "--", "--budget", "60")
    rows = results["sweeps"]
    assert code == 0
    assert [(row["kind"], row["code"], row["compiled"], row["entries"]) for row in rows] == [
        ("cold", 0, KERNELS, 2),
        ("warm", 0, 0, 2),
        ("again", 0, 0, 2),
    ]
    cold, warm, again = rows
    assert cold["trials"] == warm["trials"] > again["trials"] > 0  # the last one had the store of the one before
    assert again["configs"] < 0.1 * warm["configs"]  # times are rounded where they are kept
    (first, options), (second, _), (third, _) = swept.places
    assert first.cache == second.cache == third.cache
    assert first.store != second.store == third.store
    assert options == ["--model", "qwen3-30b-a3b", "--budget", "60"]
    assert all(row["seconds"] > row["first_trial_s"] > 0 for row in rows[:2])
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("qwen3-30b-a3b")]) == 3


def test_a_failed_sweep_ends_its_model_with_its_own_words(swept, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_FAILS", "1")
    code, results = swept("--model", "default", "mixtral-8x7b", "--repeat", "2")
    assert code == 1
    assert [(row["model"], row["kind"], row["code"]) for row in results["sweeps"]] == [
        (model, "cold", 1) for model in ("default", "mixtral-8x7b") * 2
    ]
    assert "the GPU gives no more answers" in capsys.readouterr().out


def test_sweeps_for_which_no_time_is_left_are_failures_and_are_not_begun(swept):
    code, results = swept("--stop-after", "1")
    assert code == 1
    assert [row["failure"] for row in results["sweeps"]] == ["there was no time left for it"]
    assert swept.places == []


def test_no_repeats_at_all_is_bad_usage(swept):
    with pytest.raises(UsageError, match="--repeat"):
        swept("--repeat", "0")


def test_busy_and_clock_are_means_over_the_measuring_time_alone(live_store, tmp_path):
    place = Place(tmp_path, tmp_path / "triton")
    stored = sweep_times.last_sweep(live_store([screening(config) for config in CONFIGS]))
    begin_s = stored.window[0]
    stored = sweep_times.StoredSweep(run=stored.run, trials=3, configs=3, window=(begin_s + 1.0, begin_s + 4.0))
    facts = sweep_times.Facts(place, 0, begin_s - 2.0, Watched(begin_s, 9))
    found = stored_facts(stored, ENDED, facts)
    assert found["busy_percent"] == pytest.approx(50.0, abs=2.0)
    assert (found["sm_mhz"], found["busy_covered"]) == (1980.0, 1.0)
    assert (found["first_trial_s"], found["measuring_s"], found["after_s"]) == (3.0, 3.0, 3.0)


def test_a_mean_of_few_readings_is_not_shown():
    assert shown(Mean(93.21, 0.9)) == 93.2
    assert shown(Mean(93.21, 0.5)) is None
    assert shown(None) is None


def test_a_sweep_that_replayed_is_a_failure(live_store, tmp_path):
    place = Place(tmp_path, tmp_path / "triton")
    stored = sweep_times.last_sweep(live_store([screening(CONFIGS[0])]))
    object.__setattr__(stored.run, "backend", "replay")
    with pytest.raises(RunError, match="did not measure"):
        stored_facts(stored, ENDED, sweep_times.Facts(place, 0, 0.0, Watched()))


def test_a_sweep_that_says_all_is_well_and_leaves_no_table_failed(live_store, tmp_path):
    live_store([screening(CONFIGS[0])])
    row = row_of("default", "cold", ENDED, sweep_times.Facts(Place(tmp_path, tmp_path), 3, 0.0, Watched()))
    assert (row.code, row.trials, row.compiled) == (1, 1, 3)
    assert "writes one table" in row.failure


@pytest.mark.parametrize(
    ("kind", "seconds", "code", "goal"),
    [
        ("cold", 59.0, 0, "60 met"),
        ("cold", 61.0, 0, "60 MISSED"),
        ("warm", 5.0, 1, "20 MISSED"),
        ("again", 5.0, 0, "-"),
    ],
)
def test_a_goal_is_met_in_time_by_a_sweep_that_did_not_fail(kind, seconds, code, goal):
    row = Row(model="default", kind=kind, seconds=seconds, code=code, failure=None)
    assert row.goal == goal
    assert goal in line_of(row)


def test_a_killed_sweep_says_how_long_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr("sweeps.Sweep.__init__.__defaults__", ((LIVE[0], "-c", "import time; time.sleep(60)"),))
    ended = sweep_times.run_sweep(Place(tmp_path, tmp_path), [], 0.2)
    assert ended.code == -9
    assert ended.seconds < 10
    assert "killed by signal 9" in ended.failure
    assert "it had 0 s" in ended.failure
