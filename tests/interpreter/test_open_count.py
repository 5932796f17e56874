"""What a sweep verifies against: the truth of one token count, with kernels that are right and kernels that are not."""

from __future__ import annotations

import pytest
import torch

from moetune.measure import problem
from moetune.measure.inputs import kernel_truth, make_rows, make_weights
from moetune.measure.open_count import OpenCount
from moetune.measure.router import router_of
from moetune.models.routing import Hot
from moetune.outcome import Failed, FailureKind
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.plan import LayerPlan
from moetune_kernels.route import route_reference
from moetune_kernels.shape import MoEShape, WeightFormat

# The odd problem of large values makes exp overflow on purpose; numpy, which runs the kernels here, says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=16, block_k=16, prefetch_distance=1)
PLAN = LayerPlan(gate_up=CONFIG, down=CONFIG)
CPU = torch.device("cpu")


def opened(tokens=5, experts=None, seed=3):
    shape = MoEShape(hidden=48, inter=32, local_experts=4, top_k=2, format=WeightFormat.FP16, experts=experts)
    weights = make_weights(shape, CPU, seed)
    truth = kernel_truth(shape, weights, make_rows(shape, tokens, CPU, seed))
    return OpenCount(shape, weights, truth, seed)


@pytest.fixture(scope="module")
def layer():
    return opened()


@pytest.mark.parametrize("role", Role)
def test_the_kernels_match_the_truth(layer, role):
    assert layer.verify_gemm(role, CONFIG) is None


def test_the_layer_matches_on_rows_that_the_kernels_were_not_verified_on(layer):
    assert layer.verify_layer(PLAN) is None
    rows, _ = layer._other_layer
    assert not torch.equal(rows.x, layer.truth.rows.x)


@pytest.mark.parametrize("role", Role)
def test_a_rank_that_owns_only_some_experts_verifies_only_its_slots(role):
    layer = opened(tokens=6, experts=8)
    assert 0 < layer.truth.routed < 12
    assert layer.verify_gemm(role, CONFIG) is None


@pytest.mark.parametrize("role", Role)
def test_a_kernel_that_writes_nothing_is_wrong_even_after_one_that_was_right(layer, role, monkeypatch):
    assert layer.verify_gemm(role, CONFIG) is None  # leaves the right answer in the output buffer
    monkeypatch.setattr(problem, "launch_all", lambda calls: None)
    failed = layer.verify_gemm(role, CONFIG)
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.WRONG
    assert "not finite" in failed.reason


def test_combine_is_timed_over_numbers_whatever_down_left(layer, monkeypatch):
    monkeypatch.setattr(problem, "launch_all", lambda calls: None)
    layer.verify_gemm(Role.DOWN, CONFIG)
    assert not layer.timed.y.isfinite().any()
    layer.combine()
    assert layer.timed.y.isfinite().all()


@pytest.mark.parametrize("role", Role)
def test_a_kernel_that_was_timed_is_compared_again(layer, role):
    layer.timed_gemm(role, CONFIG)()
    assert layer.recheck_gemm(role, CONFIG) is None
    layer.timed_gemm(role, CONFIG)  # poisons: as if no timed launch had written
    failed = layer.recheck_gemm(role, CONFIG)
    assert "after timing: 10 of 10 rows are not finite" in failed.reason


def test_a_layer_with_a_small_error_in_one_row_is_wrong(layer, monkeypatch):
    right = problem.moe_from_logits

    def nearly(*args):
        out = right(*args)
        out[2] *= 1.02
        return out

    monkeypatch.setattr(problem, "moe_from_logits", nearly)
    failed = layer.verify_layer(PLAN)
    assert failed.kind is FailureKind.WRONG


def test_counts_and_touched_experts_are_those_of_the_rows(layer):
    counts = torch.bincount(layer.truth.topk_ids.flatten(), minlength=4).tolist()
    assert list(layer.truth.counts) == counts
    assert layer.truth.touched == sum(count > 0 for count in counts)
    assert layer.truth.routed == 10


def test_the_same_seed_gives_the_same_layer_and_another_seed_another():
    one, two, other = opened(seed=3), opened(seed=3), opened(seed=4)
    assert torch.equal(one.weights.w13, two.weights.w13)
    assert torch.equal(one.truth.h, two.truth.h)
    assert not torch.equal(one.weights.w13, other.weights.w13)


def test_values_stay_near_one_so_that_errors_are_rounding():
    truth = opened(tokens=8).truth
    assert 0.05 < truth.h.std() < 2
    assert 0.01 < truth.y.std() < 2


def test_every_row_of_a_token_count_comes_from_its_router():
    """Those that are timed, those that the layer is verified on, and the other routings of a winner."""
    shape = MoEShape(hidden=48, inter=32, local_experts=8, top_k=2, format=WeightFormat.FP16)
    weights, router = make_weights(shape, CPU, 3), router_of(Hot(1.0), shape, 0)
    truth = kernel_truth(shape, weights, make_rows(shape, 3, CPU, 3, router))
    layer = OpenCount(shape, weights, truth, 3, router=router)
    all_logits = [truth.rows.logits, layer._other_rows().logits, *layer.other_routings()]
    assert len(all_logits) > 3
    for logits in all_logits:
        assert all(router.hot in row for row in route_reference(logits, 2)[1].tolist())
    assert layer.verify_layer(PLAN) is None
