"""Random inputs, made on the CPU here: what other routings touch."""

from __future__ import annotations

import pytest
import torch

from moetune.measure.inputs import ROUTINGS, make_rows, other_routings
from moetune_kernels.route import route_reference
from moetune_kernels.shape import MoEShape

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
