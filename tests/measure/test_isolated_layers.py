"""Where several plans are timed together, the one that ends the process is found, and the others are timed together."""

from __future__ import annotations

import itertools

import pytest
from planted_gpu import Deed

from moetune.outcome import Failed, FailureKind, Measured
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.plan import LayerPlan

CONFIGS = [
    MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=block_n, block_k=64) for block_n in (32, 64, 128)
]
PLANS = [LayerPlan(gate_up=one, down=other) for one, other in itertools.product(CONFIGS, CONFIGS)][:5]
BAD, WORSE = PLANS[1], PLANS[3]
ROUNDS = 8
SECRET = ("abort", "kill", "sleep", "raise", "raise_sticky")  # nothing but the death itself says who did it


def impatient(method, arguments, tokens):
    return 30.0 if method == "start" else 1.5


def sizes(lines):
    """How many plans each question was about, and how many rounds."""
    return [(line["about"][0], int(line["about"][1])) for line in lines]


@pytest.fixture
def opened(isolated):
    def opened(*deeds, limits=impatient):
        backend = isolated(*deeds, limits=limits)
        assert backend.open(64) is None
        return backend

    return opened


def without_faults(opened, method, plans):
    return getattr(opened(), method)(plans, ROUNDS)


@pytest.mark.parametrize("deed", SECRET)
def test_the_guilty_plan_is_found_and_the_innocent_are_timed_together(opened, diary, deed):
    right = without_faults(opened, "time_layers", PLANS)
    before = len(diary("time_layers"))
    outcomes = opened(Deed(what=deed, method="time_layers", target=BAD)).time_layers(PLANS, ROUNDS)
    assert [isinstance(outcome, Failed) for outcome in outcomes] == [False, True, False, False, False]
    assert [outcome for outcome in outcomes if isinstance(outcome, Measured)] == [right[0], *right[2:]]
    assert outcomes[1].kind is {"kill": FailureKind.RESOURCES, "sleep": FailureKind.TIMEOUT}.get(
        deed, FailureKind.LAUNCH
    )
    # All together, each alone for two rounds, the good ones together again.
    assert sizes(diary("time_layers")[before:]) == [(5, ROUNDS), *[(1, 2)] * 5, (4, ROUNDS)]


def test_a_plan_that_the_process_itself_names_is_not_launched_to_be_sure(opened, diary):
    backend = opened(Deed(what="sticky", method="time_layers", target=BAD))
    outcomes = backend.time_layers(PLANS, ROUNDS)
    assert [isinstance(outcome, Failed) for outcome in outcomes] == [False, True, False, False, False]
    assert "illegal memory access" in outcomes[1].reason
    assert sizes(diary("time_layers")) == [(5, ROUNDS), (4, ROUNDS)]
    assert backend.verify_layer(BAD) is None  # once is not twice


@pytest.mark.parametrize("deed", ["abort", "sticky"])
def test_two_guilty_plans_are_both_found(opened, deed):
    deeds = [Deed(what=deed, method="time_layers", target=plan) for plan in (BAD, WORSE)]
    outcomes = opened(*deeds).time_layers(PLANS, ROUNDS)
    assert [isinstance(outcome, Failed) for outcome in outcomes] == [False, True, False, True, False]


def test_a_plan_that_was_found_is_not_launched_again(opened, diary):
    backend = opened(Deed(what="abort", method="time_layers", target=BAD))
    backend.time_layers(PLANS, ROUNDS)
    asked = len(diary())
    assert "not launched again" in backend.time_layers([BAD], 2)[0].reason
    assert "not launched again" in backend.verify_layer(BAD).reason
    assert "not launched again" in backend.time_rerouted([BAD], 2)[0][0].reason
    assert len(diary()) == asked


def test_one_plan_by_itself_needs_no_search(opened, diary):
    (failed,) = opened(Deed(what="abort", method="time_layers")).time_layers([BAD], ROUNDS)
    assert failed.kind is FailureKind.LAUNCH
    assert len(diary("time_layers")) == 1


def test_a_process_that_dies_of_something_else_costs_no_plan(opened, diary):
    outcomes = opened(Deed(what="kill", method="time_layers", times=1)).time_layers(PLANS, ROUNDS)
    assert all(isinstance(outcome, Measured) for outcome in outcomes)
    assert sizes(diary("time_layers"))[-1] == (5, ROUNDS)


def test_plans_that_only_harm_in_company_are_timed_apart(opened, diary):
    outcomes = opened(Deed(what="abort_in_company", method="time_layers")).time_layers(PLANS, ROUNDS)
    assert [outcome.samples for outcome in outcomes] == [ROUNDS] * 5
    assert sizes(diary("time_layers")) == [(5, ROUNDS), *[(1, 2)] * 5, (5, ROUNDS), *[(1, ROUNDS)] * 5]


def test_a_plan_that_behaves_in_two_rounds_only_is_found_in_all_of_them(opened, diary):
    outcomes = opened(Deed(what="abort_in_many_rounds", method="time_layers", target=BAD)).time_layers(PLANS, ROUNDS)
    assert [isinstance(outcome, Failed) for outcome in outcomes] == [False, True, False, False, False]
    assert sizes(diary("time_layers")) == [(5, ROUNDS), *[(1, 2)] * 5, (5, ROUNDS), *[(1, ROUNDS)] * 5]


@pytest.mark.parametrize("deed", ["abort", "sticky", "sleep"])
def test_the_guilty_of_two_plans_under_other_routings_is_found(opened, deed):
    pair = [BAD, PLANS[0]]
    right = without_faults(opened, "time_rerouted", pair)
    rows = opened(Deed(what=deed, method="time_rerouted", target=BAD)).time_rerouted(pair, ROUNDS)
    assert [row[1] for row in rows] == [row[1] for row in right]
    assert len(rows) == 2
    assert all(isinstance(row[0], Failed) for row in rows)


def test_where_both_plans_are_guilty_there_is_one_row_that_says_so(opened):
    pair = [BAD, WORSE]
    deeds = [Deed(what="abort", method="time_rerouted", target=plan) for plan in pair]
    ((one, other),) = opened(*deeds).time_rerouted(pair, ROUNDS)
    assert isinstance(one, Failed)
    assert isinstance(other, Failed)


def test_nothing_to_time_is_nothing(opened):
    assert opened().time_layers([], 2) == []
