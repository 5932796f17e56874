from __future__ import annotations

from dataclasses import replace

import pytest

from moetune.engine.backend import Ceilings, compiled_now
from moetune.measure.replay import ReplayBackend, composed
from moetune.outcome import Compiled, Failed, FailureKind, Figure, Measured, Source, Stage, Subject, Trial
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=1024, inter=512, local_experts=8, top_k=2)
FIRST = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
SECOND, WRONG, SLOW, REFUSED, STRANGER = (replace(FIRST, prefetch_distance=stages) for stages in (4, 5, 6, 7, 8))
COMPILED = Compiled(registers=96, spills=0, smem_bytes=24576, block_size=128)
UNKNOWN = Figure.unavailable("no clock is known")


def measured(median_us, gbps=4000.0, intensity=16.0, issue=UNKNOWN):
    return Measured(
        median_us=median_us,
        spread_us=0.5,
        samples=9,
        flops_per_byte=Figure(intensity, Source.ANALYTICAL),
        bandwidth_gbps=Figure(gbps, Source.ANALYTICAL),
        issue_efficiency=issue,
    )


def trial(subject, choice, outcome, tokens=16, **more):
    stage = Stage.FINAL if subject is Subject.LAYER else Stage.SCREEN
    return Trial(subject=subject, tokens=tokens, choice=choice, stage=stage, outcome=outcome, **more)


IS_WRONG = Failed(FailureKind.WRONG, "relative error 0.2")
IS_SLOW = Failed(FailureKind.SLOW, "out of the race")
IS_REFUSED = Failed(FailureKind.COMPILE, "ptxas: insufficient registers")
PLAN = LayerPlan(gate_up=FIRST, down=FIRST)
OTHER = LayerPlan(gate_up=FIRST, down=SECOND)
TRIALS = (
    trial(Subject.GATE_UP, FIRST, measured(60.0), compiled=COMPILED, verified=True),
    trial(Subject.DOWN, FIRST, measured(30.0), compiled=COMPILED, verified=True),
    trial(Subject.DOWN, SECOND, measured(20.0, gbps=3000.0, intensity=10.0), compiled=COMPILED, verified=True),
    trial(Subject.DOWN, WRONG, IS_WRONG, compiled=COMPILED),
    trial(Subject.DOWN, SLOW, IS_SLOW, compiled=COMPILED),
    trial(Subject.DOWN, REFUSED, IS_REFUSED, tokens=0),
    trial(Subject.ROUTING, 16, measured(4.0)),
    trial(Subject.COMBINE, 0, measured(3.0)),
    trial(Subject.LAYER, PLAN, measured(95.0), verified=True),
)


@pytest.fixture
def backend():
    opened = ReplayBackend(
        SHAPE, TARGETS["sm_90"], Ceilings(bytes_per_s=4.2e12, flops=7.8e14), {16: 55.0, 32: 60.0}, TRIALS
    )
    assert opened.open(16) is None
    return opened


def test_recorded_kernels_answer_with_their_recorded_ends(backend):
    assert backend.time_kernel(Role.GATE_UP, FIRST, 100) == measured(60.0)
    assert backend.time_kernel(Role.DOWN, WRONG, 3) == IS_WRONG
    assert backend.first_launch_us(Role.DOWN, SLOW) == IS_SLOW
    assert backend.time_routing(16) == measured(4.0)
    assert backend.time_combine() == measured(3.0)
    assert backend.bound_us() == 55.0
    assert (backend.name, backend.shape, backend.device) == ("replay", SHAPE, TARGETS["sm_90"])


def test_what_was_not_recorded_is_a_failure_and_never_a_number(backend):
    plan = LayerPlan(gate_up=STRANGER, down=FIRST)
    answers = [
        backend.time_kernel(Role.GATE_UP, STRANGER, 3),
        backend.time_kernel(Role.GATE_UP, SECOND, 3),
        backend.first_launch_us(Role.DOWN, STRANGER),
        backend.verify_kernel(Role.DOWN, STRANGER),
        backend.time_routing(64),
        backend.time_layers([plan], 6)[0],
        backend.verify_layer(plan),
        backend.open(64),
        backend.open(32),  # a bound, but no trials
    ]
    assert {answer.kind for answer in answers} == {FailureKind.UNRECORDED}


def test_the_recorded_candidates_are_the_space(backend):
    assert list(backend.recorded(Role.GATE_UP)) == [FIRST]
    assert list(backend.recorded(Role.DOWN)) == [FIRST, SECOND, WRONG, SLOW, REFUSED]
    compiled = dict(compiled_now(backend, Role.DOWN, [FIRST, REFUSED, STRANGER]))
    assert compiled[FIRST] == COMPILED
    assert compiled[REFUSED] == IS_REFUSED
    assert compiled[STRANGER].kind is FailureKind.UNRECORDED


def test_a_recorded_layer_is_its_own_time_and_another_the_sum_of_its_kernels(backend):
    recorded, summed = backend.time_layers([PLAN, OTHER], 40)
    assert recorded == measured(95.0)
    assert summed.median_us == pytest.approx(60.0 + 20.0 + 4.0 + 3.0)
    assert summed.source is Source.COMPOSED
    assert summed.spread_us == pytest.approx(2.0)


def test_a_recorded_layer_is_heard_in_the_finals_of_its_own_token_count_only(backend):
    assert backend.recorded_plans(16) == [PLAN]
    assert backend.recorded_plans(32) == []


def test_composed_figures_are_means_over_what_they_count():
    parts = [
        measured(60.0, 4000.0, 16.0, Figure(0.5, Source.STATIC)),
        measured(20.0, 2000.0, 10.0, Figure(0.1, Source.STATIC)),
    ]
    found = composed(parts)
    assert found.bandwidth_gbps.value == pytest.approx((60 * 4000 + 20 * 2000) / 80)
    assert found.issue_efficiency.value == pytest.approx((60 * 0.5 + 20 * 0.1) / 80)
    assert {found.bandwidth_gbps.source, found.issue_efficiency.source} == {Source.COMPOSED}
    moved = [60 * 4000, 20 * 2000]
    assert found.flops_per_byte.value == pytest.approx((16 * moved[0] + 10 * moved[1]) / sum(moved))


def test_a_composed_figure_with_an_unknown_part_is_unavailable_and_says_why(backend):
    summed = backend.time_layers([OTHER], 6)[0]
    assert summed.issue_efficiency == UNKNOWN
    assert summed.bandwidth_gbps.source is Source.COMPOSED


def test_verdicts_come_from_the_recording(backend):
    assert backend.verify_kernel(Role.GATE_UP, FIRST) is None
    assert backend.verify_kernel(Role.DOWN, WRONG) == backend.recheck_kernel(Role.DOWN, WRONG) == IS_WRONG
    assert backend.recheck_kernel(Role.GATE_UP, FIRST) is None
    assert backend.verify_layer(PLAN) is None
    assert backend.verify_layer(OTHER) is None  # both kernels were verified
    unchecked = [replace(item, verified=False) for item in TRIALS]
    other = ReplayBackend(SHAPE, TARGETS["sm_90"], backend.ceilings(), {16: 55.0}, unchecked)
    other.open(16)
    for verdict in (other.verify_kernel(Role.GATE_UP, FIRST), other.verify_layer(PLAN)):
        assert isinstance(verdict, Failed)
        assert verdict.kind is FailureKind.UNRECORDED


def test_the_same_question_has_the_same_answer(backend):
    for _ in range(3):
        assert backend.time_layers([PLAN, OTHER], 6) == backend.time_layers([PLAN, OTHER], 40)
        assert backend.time_kernel(Role.DOWN, SECOND, 3) == backend.time_kernel(Role.DOWN, SECOND, 25)


def test_of_two_ends_of_one_trial_the_later_counts():
    later = replace(TRIALS[0], outcome=IS_WRONG, verified=False)
    backend = ReplayBackend(SHAPE, TARGETS["sm_90"], Ceilings(bytes_per_s=1.0, flops=1.0), {16: 1.0}, [*TRIALS, later])
    backend.open(16)
    assert backend.time_kernel(Role.GATE_UP, FIRST, 3) == IS_WRONG
