"""Which trials a store and a recording list, in which order, and which are the fastest."""

from __future__ import annotations

import itertools
import sqlite3
from dataclasses import replace

import pytest

from moetune.outcome import Failed, FailureKind, Stage, Subject, Trial
from moetune.store import (
    Recording,
    Store,
    StoreError,
    TrialFilter,
    fastest,
    newest_recorded,
    recorded_run,
)
from moetune_kernels.config import MoEKernelConfig, Structure
from tests.store.test_store import CONFIG, MEASURED, PLAN, SHAPE, TRIALS, fill, provenance

OTHER = replace(SHAPE, top_k=4)
WRONG = Failed(FailureKind.WRONG, 'relative error 0.3, "kind":"slow",')
MIXED = (
    *TRIALS,
    replace(TRIALS[0], outcome=WRONG),
    replace(TRIALS[0], tokens=64, verified=True),
    replace(TRIALS[0], tokens=64, outcome=Failed(FailureKind.SLOW, "its first launch took long")),
    Trial(subject=Subject.COMBINE, tokens=64, choice=0, stage=Stage.SCREEN, outcome=MEASURED),
)
FILTERS = [
    TrialFilter(shape_key=key, tokens=tokens, subject=subject, failed=failed, kind=kind, verified=verified)
    for key, tokens, subject, failed, kind, verified in itertools.product(
        (None, SHAPE.key, OTHER.key, "e1_h1_i1_k1_bf16"),
        ((), (16,), (16, 64), (7,)),
        (None, Subject.GATE_UP, Subject.LAYER),
        (False, True),
        (None, FailureKind.WRONG, FailureKind.COMPILE),
        (False, True),
    )
]


def config(block_n):
    return MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=block_n, block_k=64)


def timed(block_n, median_us, tokens=16, subject=Subject.GATE_UP, **changes):
    outcome = replace(MEASURED, median_us=median_us)
    trial = Trial(subject=subject, tokens=tokens, choice=config(block_n), stage=Stage.SCREEN, outcome=outcome)
    return replace(trial, **changes)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trials.sqlite"


@pytest.fixture
def mixed(path):
    fill(path, provenance(), MIXED)
    fill(path, provenance(shape=OTHER), MIXED[:3])
    return path


def test_the_latest_trials_come_first_with_run_number_and_bound(mixed):
    with Store.to_read(mixed) as store:
        listed = list(store.newest(TrialFilter()))
        assert [one.trial for one in listed] == [*MIXED[:3][::-1], *MIXED[::-1]]
        assert [one.number for one in listed] == list(range(len(MIXED) + 3, 0, -1))
        first, second = store.runs()
        assert [one.run for one in listed] == [second] * 3 + [first] * len(MIXED)
        assert {one.bound_us for one in listed if one.trial.tokens == 16} == {100.5}
        assert {one.bound_us for one in listed if one.trial.tokens != 16} == {None}
        assert store.trials_of_runs() == {first.run: (len(MIXED), 3), second.run: (3, 1)}


def test_a_store_filters_as_the_words_say(mixed):
    """SQL over the stored text and Python over the parsed trials answer the same, for every filter."""
    with Store.to_read(mixed) as store:
        every = list(store.newest(TrialFilter()))
        answers = set()
        for wanted in FILTERS:
            found = list(store.newest(wanted))
            assert found == [one for one in every if wanted.admits(one.run.shape, one.trial)], wanted
            assert store.count(wanted) == len(found)
            answers.add(len(found))
        assert answers >= {0, 1, 2, 3, len(every)}


def test_a_recording_lists_as_a_store_does(mixed):
    recording = Recording(
        provenance=provenance(),
        ceilings={"bytes_per_s": 4.2e12, "flops": 7.8e14},
        bounds={16: 100.5},
        measured_at="2026-12-01T08:00:00+00:00",
        command="moetune sweep",
        trials=MIXED,
    )
    run = recorded_run(recording, "tiny.jsonl.xz")
    with Store.to_read(mixed) as store:
        for wanted in FILTERS:
            stored = [one for one in store.newest(wanted) if one.run.shape == SHAPE]
            listed = newest_recorded(recording, run, wanted)
            assert [(one.trial, one.bound_us) for one in listed] == [(one.trial, one.bound_us) for one in stored]
    assert (run.run, run.backend, run.driver, run.ended_at) == ("tiny.jsonl.xz", "cuda", "580.1", None)


def test_no_more_is_read_than_is_asked_for(mixed):
    connection = sqlite3.connect(mixed)
    connection.execute("UPDATE trials SET outcome = 'damaged' WHERE id = 1")
    connection.commit()
    connection.close()
    with Store.to_read(mixed) as store:
        newest = store.newest(TrialFilter())
        assert next(newest).trial == MIXED[2]
        with pytest.raises(StoreError, match="trial 1"):
            list(newest)


def listed_of(path, **wanted):
    with Store.to_read(path) as store:
        return list(store.newest(TrialFilter(**wanted)))


def numbers(found):
    return [(one.trial.tokens, one.trial.subject.value, one.trial.outcome.median_us) for one in found]


def test_the_fastest_are_chosen_by_token_count_and_subject(path):
    trials = [timed(64, 12.0), timed(32, 14.0), timed(128, 13.0), timed(64, 5.0, tokens=1)]
    trials += [timed(64, 9.0, subject=Subject.DOWN), timed(16, 1.0, outcome=Failed(FailureKind.SLOW, "slow"))]
    fill(path, provenance(), trials)
    found = fastest(listed_of(path), 2)
    assert numbers(found) == [
        (1, "gate_up", 5.0),
        (16, "gate_up", 12.0),
        (16, "gate_up", 13.0),
        (16, "down", 9.0),
    ]


def test_the_latest_trial_of_a_choice_counts(path):
    """An early time of a kernel that was found to be wrong, or slower with more samples, is no record."""
    later_wrong = [timed(64, 5.0), timed(64, 5.0, outcome=WRONG)]
    later_slower = [timed(32, 6.0), timed(32, 8.0, verified=True)]
    fill(path, provenance(), [*later_wrong, *later_slower, timed(128, 7.0)])
    assert numbers(fastest(listed_of(path), 9)) == [(16, "gate_up", 7.0), (16, "gate_up", 8.0)]
    assert numbers(fastest(listed_of(path), 9, verified=True)) == [(16, "gate_up", 8.0)]


def test_times_of_other_devices_or_versions_are_not_compared(path):
    fill(path, provenance(), [timed(64, 5.0)])
    fill(path, provenance(triton="3.7.0"), [timed(64, 6.0)])
    fill(path, provenance(backend="replay"), [timed(64, 4.0)])
    fill(path, provenance(triton="3.7.0"), [timed(32, 7.0)])
    found = fastest(listed_of(path), 1)
    assert [(one.run.triton, one.run.backend, one.trial.outcome.median_us) for one in found] == [
        ("3.7.0", "cuda", 6.0),
        ("3.6.0", "replay", 4.0),
        ("3.6.0", "cuda", 5.0),
    ]


def test_plans_and_block_ms_are_choices_as_well(path):
    layer = Trial(subject=Subject.LAYER, tokens=16, choice=PLAN, stage=Stage.FINAL, outcome=MEASURED, verified=True)
    faster = replace(layer, outcome=replace(MEASURED, median_us=1.0))
    routing = [
        Trial(subject=Subject.ROUTING, tokens=16, choice=m, stage=Stage.SCREEN, outcome=MEASURED) for m in (16, 32)
    ]
    fill(path, provenance(), [layer, faster, *routing, timed(64, 2.0, choice=CONFIG)])
    assert [(one.trial.subject, one.trial.choice) for one in fastest(listed_of(path), 5)] == [
        (Subject.GATE_UP, CONFIG),
        (Subject.ROUTING, 32),
        (Subject.ROUTING, 16),
        (Subject.LAYER, PLAN),
    ]
