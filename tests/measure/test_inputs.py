"""Random inputs, made on the CPU here: what other routings touch, what a truth costs in waits and in memory."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from moetune.measure.calls import DTYPES
from moetune.measure.inputs import (
    DRAWS,
    ROUTINGS,
    Rows,
    kernel_truth,
    layer_truth,
    make_rows,
    make_weights,
    other_routings,
    routed_truth,
    token_bytes,
)
from moetune.measure.problem import Problem
from moetune.measure.router import router_of
from moetune.models.routing import Hot, Uniform, Zipf
from moetune_kernels.down import down_reference
from moetune_kernels.fused_moe import fused_moe_reference
from moetune_kernels.gate_up import gate_up_reference
from moetune_kernels.route import route_reference
from moetune_kernels.shape import MoEShape
from tests.host_waits import HostWaits

SHAPE = MoEShape(hidden=64, inter=64, local_experts=8, top_k=2)
CPU = torch.device("cpu")


def touched(shape, logits):
    _, ids = route_reference(logits, shape.top_k)
    return len({expert for expert in ids.flatten().tolist() if 0 <= expert < shape.local_experts})


@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_other_routings_touch_from_the_fewest_to_the_most_experts(tokens):
    routings = other_routings(SHAPE, tokens, CPU, seed=7)
    counts = [touched(SHAPE, logits) for logits in routings]
    assert counts == sorted(set(counts))
    assert len(counts) > 1
    assert counts[-1] == min(2 * tokens, 8)
    assert {logits.shape for logits in routings} == {make_rows(SHAPE, tokens, CPU, seed=7).logits.shape}


def test_no_more_routings_than_worth_timing_spread_from_the_fewest_to_the_most():
    shape = MoEShape(hidden=64, inter=64, local_experts=128, top_k=8)
    counts = [touched(shape, logits) for logits in other_routings(shape, 16, CPU, seed=7)]
    assert len(counts) == ROUTINGS
    assert counts == sorted(set(counts))


@pytest.mark.parametrize("tokens", [1, 200], ids=["one-token", "so-many-that-all-are-touched"])
def test_there_is_no_other_routing_where_every_draw_touches_as_many(tokens):
    assert other_routings(SHAPE, tokens, CPU, seed=7) == []


def test_experts_of_other_ranks_are_not_counted():
    shape = MoEShape(hidden=64, inter=64, local_experts=4, experts=8, top_k=2)
    routings = other_routings(shape, 1, CPU, seed=3)
    assert [touched(shape, logits) for logits in routings] == [0, 1, 2]
    assert {logits.shape for logits in routings} == {(1, 8)}


def draws_one_by_one(shape, tokens, seed, router):
    """Every draw kept until it is known what all touch: the last one of each number, from the fewest to the most."""
    generator = torch.Generator(CPU).manual_seed(seed)
    draws = [router.logits(tokens, generator, DTYPES[shape.format]) for _ in range(DRAWS)]
    ids = [logits.topk(shape.top_k, dim=1).indices.unique() for logits in draws]
    by_touched = {int((one < shape.local_experts).sum()): logits for one, logits in zip(ids, draws, strict=True)}
    counts = sorted(by_touched)
    steps = min(len(counts), ROUTINGS) - 1
    return [by_touched[counts[round(step * (len(counts) - 1) / steps)]] for step in range(steps + 1)] if steps else []


@pytest.mark.parametrize("routing", [Uniform(), Zipf(1.2), Hot(0.8)], ids=lambda routing: type(routing).__name__)
@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("local_experts", [8, 32], ids=["one-of-four-ranks", "one-rank"])
def test_the_chosen_draws_are_to_the_bit_those_of_keeping_them_all(local_experts, tokens, routing):
    shape = MoEShape(hidden=64, inter=64, local_experts=local_experts, experts=32, top_k=4)
    router = router_of(routing, shape, 5)
    want = draws_one_by_one(shape, tokens, 11, router)
    got = other_routings(shape, tokens, CPU, 11, router)
    assert len(got) == len(want)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert want or tokens == 1  # else nothing was compared


def test_other_routings_cost_one_wait_for_all_draws():
    with HostWaits() as waits:
        assert len(other_routings(SHAPE, 3, CPU, seed=7)) > 1
    assert waits.count == 1


@pytest.mark.parametrize("experts", [4, 64])
def test_the_waits_of_opening_a_token_count_do_not_grow_with_its_experts(experts):
    shape = MoEShape(hidden=32, inter=16, local_experts=experts, top_k=2)
    weights, rows = make_weights(shape, CPU, 1), make_rows(shape, 9, CPU, 2)
    with HostWaits() as waits:
        truth = kernel_truth(shape, weights, rows)
    assert waits.count == 3  # its own slots, gate-up's and down's
    with HostWaits() as waits:
        problem = Problem("timing inputs", shape, weights, truth)
    assert waits.count == 1  # which slots are not routed
    with HostWaits() as waits:
        problem.restore()
    assert waits.count == 1
    with HostWaits() as waits:
        layer_truth(shape, weights, rows)
    assert waits.count == 2  # gate-up's and down's


def test_a_truth_is_what_the_references_give():
    shape = MoEShape(hidden=64, inter=48, local_experts=8, experts=16, top_k=3)
    weights, rows = make_weights(shape, CPU, 1), make_rows(shape, 21, CPU, 2)
    truth = kernel_truth(shape, weights, rows)
    flat = truth.topk_ids.flatten()
    by_expert = [(flat == expert).nonzero().flatten().tolist() for expert in range(8)]
    assert truth.slots.tolist() == [slot for slots in by_expert for slot in slots]
    assert truth.counts == tuple(len(slots) for slots in by_expert)
    h = gate_up_reference(rows.x, weights.w13, truth.topk_ids)
    assert torch.equal(truth.h, h[truth.slots])
    assert torch.equal(truth.h_in[: truth.routed], h[truth.slots].to(rows.x.dtype))
    assert not truth.h_in[truth.routed :].any()
    assert torch.equal(truth.y, down_reference(h.to(rows.x.dtype), weights.w2, truth.topk_weights, truth.topk_ids))
    want = fused_moe_reference(rows.x, weights.w13, weights.w2, truth.topk_weights, truth.topk_ids)
    assert torch.equal(layer_truth(shape, weights, rows), want)


def most_bytes(make):
    """Return the most memory that a call holds at once beyond what is there before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = make()
    del kept
    held = most = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def to_one_expert(rows, top_k):
    ids = torch.full((len(rows.x), top_k), 3, dtype=torch.int32)
    return torch.ones(ids.shape), ids


@pytest.mark.plain_memory
@pytest.mark.parametrize("routed", ["by-logits", "to-one-expert"])
@pytest.mark.parametrize(("tokens", "experts"), [(600, 16), (40, 96)], ids=["many-rows", "many-experts"])
@pytest.mark.parametrize(("hidden", "inter"), [(512, 64), (64, 512), (256, 256)])
def test_a_truth_never_holds_more_memory_than_is_asked_for(hidden, inter, tokens, experts, routed):
    """Whatever routes the rows; with many experts a float32 copy of all their weights would be over."""
    shape = MoEShape(hidden=hidden, inter=inter, local_experts=experts, top_k=4)
    weights, rows = make_weights(shape, CPU, 1), make_rows(shape, tokens, CPU, 2)

    def make():
        mine = Rows(rows.x.clone(), rows.logits.clone())
        if routed == "by-logits":
            return kernel_truth(shape, weights, mine), layer_truth(shape, weights, mine)
        return routed_truth(weights, mine, *to_one_expert(mine, shape.top_k))

    most = most_bytes(make)
    assert most > tokens * shape.top_k * (hidden + inter) * 4  # h and y: memory is seen at all
    assert most < token_bytes(shape, tokens)
