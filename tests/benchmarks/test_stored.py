"""What a store says of the last sweep: a real replay's, and one with counted winners and a failed compile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from stored import last_sweep, seconds, stored_sweep, tried, was_counted
from sweeps import Place, run_sweep

from moetune.errors import RunError
from moetune.outcome import Failed, FailureKind, Figure, Source, Stage, Subject, Trial
from moetune.store import Store, TrialFilter
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.plan import LayerPlan
from tests.engine.conftest import measured

CONFIGS = [MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=n, block_k=64) for n in (32, 64, 128)]
PLAN = LayerPlan(gate_up=CONFIGS[0], down=CONFIGS[1])
COUNTED = replace(measured(9.0), bandwidth_gbps=Figure(3000.0, Source.COUNTER))


def screening(config, tokens=8, subject=Subject.GATE_UP, outcome=None, verified=False):
    outcome = outcome or measured(5.0, samples=3)
    return Trial(subject=subject, tokens=tokens, choice=config, stage=Stage.SCREEN, outcome=outcome, verified=verified)


def final(outcome):
    return Trial(subject=Subject.LAYER, tokens=8, choice=PLAN, stage=Stage.FINAL, outcome=outcome, verified=True)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """Replay two token counts of a recording that ships, as the benchmarks start a sweep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        place = Place(tmp_path_factory.mktemp("replay"), tmp_path_factory.mktemp("triton"))
        ended = run_sweep(place, ["--model", "qwen3-30b-a3b", "--tokens", "1,16"], 120.0)
    assert ended.code == 0, ended.said
    return place


def test_a_replay_s_store_tells_trials_configs_and_when_they_ended(replayed):
    found = last_sweep(replayed.store)
    with Store.to_read(replayed.store) as store:
        listed = list(store.newest(TrialFilter()))
    assert found.trials == len(listed) > 100
    assert found.run.backend == "replay"
    begin, end = found.window
    stamps = [seconds(one.ended_at) for one in listed]
    assert min(stamps) < begin < end <= max(stamps)  # failures of the compiler come first in a replay, and do not count
    assert tried(replayed.store) == found.configs < found.trials
    assert sorted(replayed.table().entries) == [1, 16]


def test_the_window_leaves_out_the_compiler_s_failures_and_counted_winners(live_store):
    refused = Failed(FailureKind.COMPILE, "ptxas refuses")
    path = live_store([screening(CONFIGS[2], tokens=0, outcome=refused), screening(CONFIGS[0]), final(measured(9.0))])
    with Store.to_read(path) as store:
        run, listed = store.runs()[-1], list(store.newest(TrialFilter()))
    stamps = [f"2026-12-01T08:00:0{number}.000+00:00" for number in (7, 3, 1)]  # the newest first
    listed = [replace(one, ended_at=stamp) for one, stamp in zip(listed, stamps, strict=True)]
    counted = replace(listed[0], trial=final(COUNTED), ended_at="2026-12-01T08:00:50.000+00:00")
    found = stored_sweep(run, [counted, *listed])
    began_s = seconds("2026-12-01T08:00:00+00:00")
    assert found.window == (began_s + 3, began_s + 7)
    assert (found.trials, found.configs) == (4, 1)


def test_only_finals_with_a_counter_s_figure_were_counted():
    assert was_counted(final(COUNTED))
    assert not was_counted(final(measured(9.0)))
    assert not was_counted(final(Failed(FailureKind.SLOW, "lucky")))
    assert not was_counted(screening(CONFIGS[0], outcome=COUNTED))


def test_the_last_sweep_is_told_apart_from_those_before(live_store):
    path = live_store([screening(config) for config in CONFIGS], [screening(CONFIGS[0], tokens=16)])
    found = last_sweep(path)
    assert (found.trials, found.configs) == (1, 1)
    assert tried(path) == 3  # of all runs


def test_a_store_that_is_not_there_yet_has_tried_nothing(tmp_path):
    assert tried(tmp_path / "trials.sqlite") == 0
    (tmp_path / "trials.sqlite").touch()
    assert tried(tmp_path / "trials.sqlite") == 0
    with pytest.raises(RunError, match="no sweep began"):
        last_sweep(tmp_path / "trials.sqlite")


def test_a_place_with_two_tables_has_no_table(tmp_path):
    place = Place(tmp_path, tmp_path / "triton")
    for name in ("a.json", "b.json"):
        path = Path(place.tables, "nvidia_h200", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with pytest.raises(RunError, match="holds 2"):
        place.table_path()
