"""No wrong candidate is accepted: every planted kind is refused by name, and every check refuses one that no other does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from moetune.measure import compare, problem
from moetune.measure.guarded import GuardedRows
from moetune.measure.odd import OddProblems, odd_cases
from moetune.measure.open_count import OpenCount
from moetune.measure.problem import Problem
from moetune.measure.verdict import Queued, first_wrong
from moetune.outcome import FailureKind
from moetune_kernels.config import Role
from moetune_kernels.route import route_reference
from tests.measure import faults_planted as kinds
from tests.measure.planted import (
    ALL_TOUCHED,
    CONFIG,
    ONE_OF_TWO_RANKS,
    SOME_TOUCHED,
    Planted,
    Right,
    layer_verdict,
    opened,
    verdict,
)

SETUPS = {"all-touched": ALL_TOUCHED, "some-touched": SOME_TOUCHED, "one-of-two-ranks": ONE_OF_TWO_RANKS}
PLANTED = [(kind, role) for kind, (_, roles, _) in kinds.KINDS.items() for role in roles]


def planted(monkeypatch, fault, role):
    """Plant a fault in one GEMM, after a right kernel has left its answers in the same memory."""
    count = opened(ALL_TOUCHED)
    Planted(Right()).install(monkeypatch)
    assert first_wrong([count.timed.queue(role, CONFIG)]) is None
    return count, Planted(fault, (role,)).install(monkeypatch)


def test_enough_kinds_are_planted():
    assert len(kinds.KINDS) >= 16
    assert len({fault for fault, _, _ in kinds.KINDS.values()}) == len(kinds.KINDS)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("role", Role)
def test_a_right_kernel_passes_every_check(monkeypatch, role, setup):
    kernel = Planted(Right()).install(monkeypatch)
    assert verdict(opened(setup), kernel, role) is None


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_a_right_layer_passes_every_check(monkeypatch, setup):
    Planted(Right()).install(monkeypatch)
    assert layer_verdict(opened(setup)) is None


@pytest.mark.parametrize(("kind", "role"), PLANTED, ids=[f"{kind}-{role.value}" for kind, role in PLANTED])
def test_a_planted_kernel_is_refused_by_name(monkeypatch, kind, role):
    fault, _, reason = kinds.KINDS[kind]
    wrong = verdict(*planted(monkeypatch, fault(), role), role)
    assert wrong is not None
    assert wrong.kind is FailureKind.WRONG
    assert wrong.reason.startswith(f"{role.value}: ")
    assert re.search(reason, wrong.reason), wrong.reason


@pytest.mark.parametrize("role", Role)
def test_a_right_kernel_is_not_refused_for_what_another_wrote_to_the_inputs(monkeypatch, role):
    count, vandal = planted(monkeypatch, kinds.WritesToItsInputs(), role)
    count.timed_gemm(role, CONFIG)()  # timed before it is verified, as in a race
    right = Planted(Right()).install(monkeypatch)
    assert count.verify_gemm(role, CONFIG) is None
    launch = count.timed_gemm(role, CONFIG)
    count.truth.rows.x.zero_()
    count.truth.h_in.zero_()
    launch()
    assert count.recheck_gemm(role, CONFIG) is None
    vandal.install(monkeypatch)
    assert "wrote to its inputs" in count.verify_gemm(role, CONFIG).reason
    right.install(monkeypatch)
    count.odd = fresh_odd(count)
    assert verdict(count, right, role) is None


def layer_planted(monkeypatch, layer):
    count = opened(ALL_TOUCHED)
    Planted(Right()).install(monkeypatch)
    monkeypatch.setattr(problem, "moe_from_logits", layer)
    return count


@pytest.mark.parametrize("kind", kinds.LAYER_KINDS)
def test_a_planted_layer_is_refused_by_name(monkeypatch, kind):
    make, reason = kinds.LAYER_KINDS[kind]
    wrong = layer_verdict(layer_planted(monkeypatch, make()))
    assert wrong is not None
    assert wrong.kind is FailureKind.WRONG
    assert re.search(f"layer: {reason}", wrong.reason), wrong.reason


@pytest.mark.parametrize("role", Role)
def test_a_layer_whose_kernel_was_never_raced_is_refused_for_the_kernel(monkeypatch, role):
    count = opened(ALL_TOUCHED)
    Planted(kinds.WrongForOneToken(), (role,)).install(monkeypatch)
    assert layer_verdict(count).reason.startswith(f"{role.value}: one token: ")


# Each check, how it is taken away, and a kind that it alone refuses.


def nothing(*_args, **_named):
    return None


def nothing_queued(*_args, **_named):
    return []


def without_case(name):
    def take(monkeypatch):
        whole = OddProblems.problems
        monkeypatch.setattr(OddProblems, "problems", lambda self: [p for p in whole(self) if p.name != name])

    return take


def without_layer_case(name):
    def take(monkeypatch):
        whole = OddProblems.layers
        monkeypatch.setattr(OddProblems, "layers", lambda self: [case for case in whole(self) if case[0] != name])

    return take


def without(owner, name, instead=nothing):
    return lambda monkeypatch: monkeypatch.setattr(owner, name, instead)


def without_the_timing_inputs(monkeypatch):
    """Without the comparison before timing; the one after it and the bursts stay."""
    whole, met = Problem.queue, []

    def queue(self, role, config, launches=1):
        if self.name == "timing inputs" and not met:
            met.append(self)
            for call in self.gemm(role, config):
                call.launch()
            return Queued(torch.zeros(1), nothing)
        return whole(self, role, config, launches)

    monkeypatch.setattr(Problem, "queue", queue)


def without_bands(place):
    """Without what ``why_written`` says of one place."""

    def take(monkeypatch):
        whole = GuardedRows.why_written

        def why_written(self, unused):
            found = whole(self, unused) or ""
            return ", ".join(part for part in found.split(", ") if part and place not in part) or None

        monkeypatch.setattr(GuardedRows, "why_written", why_written)

    return take


CHECKS = {
    "comparison with float32": (without(problem, "why_gemm_differs"), kinds.DropsTheInnerTail),
    "timing inputs": (without_the_timing_inputs, kinds.WrongInItsFirstLaunch),
    "poison": (without(GuardedRows, "poison"), kinds.LeavesRowsOut),
    "closer limit of one GEMM": (without(compare, "GEMM_SHARE", {}), kinds.SumsIn16Bits),
    "single elements": (
        without(compare, "worst_element", lambda got, want, limit, of_rows, rounded=None: torch.tensor(-1.0)),
        kinds.HasOneElementOff,
    ),
    "band before": (without_bands("before its first row"), kinds.WritesARowBefore),
    "band after": (without_bands("past its last row"), kinds.WritesARowPast),
    "rows not routed": (without_bands("not routed"), kinds.WritesRowsThatAreNotRouted),
    "inputs": (without(Problem, "restore"), kinds.WritesToInputsThatItDoesNotUse),
    "another seed": (without(OpenCount, "_queue_on_another_seed", nothing_queued), kinds.AnswersBySize),
    "after timing": (without(OpenCount, "_judge_timed"), kinds.RacesWhenCold),
    "burst": (without(OpenCount, "_burst"), kinds.RacesBackToBack),
}
CASES = {
    "a row past full blocks": kinds.WrongPast256RowsOfAnExpert,
    "all slots to expert 0": kinds.WrongWhenAllGoToOneExpert,
    "ids outside 0..E-1": kinds.WritesRowsThatAreNotRouted,
    "every expert once": kinds.SkipsAnExpert,
    "large values and a row of zeros": kinds.DividesByTheRowsSize,
    "one token": kinds.WrongForOneToken,
    "expert 1 left empty": kinds.WrongAfterAnEmptyExpert,
}
MUTATIONS = CHECKS | {name: (without_case(name), fault) for name, fault in CASES.items()}
LAYER_MUTATIONS = {
    "timing inputs": (
        without(OpenCount, "_queue_layer_on_timing_inputs", nothing_queued),
        "returns the output of the previous input",
    ),
    "another seed": (
        without(OpenCount, "_queue_layer_on_another_seed", nothing_queued),
        "knows the rows that are timed",
    ),
    "after timing": (
        without(OpenCount, "recheck_layers", lambda self, outs: [None] * len(outs)),
        "is wrong from its 20th replay on",
    ),
    "all tokens to the same experts": (
        without_layer_case("all tokens to the same experts"),
        "is wrong when all tokens go the same way",
    ),
    "one token": (without_layer_case("one token"), "is wrong for one token"),
}


def fresh_odd(count):
    """The same odd problems, passed by nobody yet."""
    return OddProblems(count.shape, count.weights, 11, count.odd.problems(), count.odd.layers())


def untouched(count):
    """Return an expert that no rows but those of "every expert once" reach; None when there is none."""
    others = [problem for problem in count.odd.problems() if problem.name != "every expert once"]
    ids = [count.truth.topk_ids, route_reference(count._other_rows().logits, count.shape.top_k)[1]]
    reached = {int(owner) for found in [*ids, *(p.truth.topk_ids for p in others)] for owner in found.flatten()}
    return next((expert for expert in range(count.shape.local_experts) if expert not in reached), None)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("check", MUTATIONS)
def test_without_a_check_a_planted_kernel_passes(monkeypatch, check, role):
    take_away, fault = MUTATIONS[check]
    count = opened(SOME_TOUCHED if check == "every expert once" else ALL_TOUCHED)
    monkeypatch.setattr(kinds.SkipsAnExpert, "skipped", untouched(count))

    def asked():
        Planted(Right()).install(monkeypatch)
        assert count.verify_gemm(role, CONFIG) is None  # leaves right answers in all memory
        count.odd = fresh_odd(count)
        return Planted(fault(), (role,)).install(monkeypatch)

    assert verdict(count, asked(), role) is not None
    kernel = asked()
    take_away(monkeypatch)
    assert verdict(count, kernel, role) is None


@pytest.mark.parametrize("check", LAYER_MUTATIONS)
def test_without_a_check_a_planted_layer_passes(monkeypatch, check):
    take_away, kind = LAYER_MUTATIONS[check]
    make, _ = kinds.LAYER_KINDS[kind]
    assert layer_verdict(layer_planted(monkeypatch, make())) is not None
    count = layer_planted(monkeypatch, make())
    take_away(monkeypatch)
    assert layer_verdict(count) is None


def test_without_the_kernels_own_problems_a_layer_with_a_wrong_kernel_passes(monkeypatch):
    Planted(kinds.WrongForOneToken()).install(monkeypatch)
    assert layer_verdict(opened(ALL_TOUCHED)) is not None
    monkeypatch.setattr(OddProblems, "queue_gemm", nothing_queued)
    assert layer_verdict(opened(ALL_TOUCHED)) is None


def test_every_odd_case_has_a_kind_that_it_alone_refuses():
    names = {case.name for shape, _ in SETUPS.values() for case in odd_cases(shape)}
    assert names == set(CASES)
    count = opened(ALL_TOUCHED)
    assert {name for name, _, _ in count.odd.layers()} < set(LAYER_MUTATIONS)
    assert 0 not in count.truth.counts


def test_the_page_on_verification_names_every_kind_every_case_and_every_check():
    page = (Path(__file__).resolve().parents[2] / "docs" / "verification.md").read_text("utf-8")
    kernels, layers = page.split("| a layer that", 1)
    assert [kind for kind in kinds.KINDS if kind not in kernels] == []
    assert [kind for kind in kinds.LAYER_KINDS if f"| {kind} |" not in layers] == []
    assert [case for case in CASES if f"| `{case}` |" not in kernels] == []
    assert [check for check in MUTATIONS if f"**{check}**" not in kernels] == []
    assert [check for check in LAYER_MUTATIONS if f"**{check}**" not in layers] == []
