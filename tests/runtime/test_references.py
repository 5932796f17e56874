"""The references, on a CPU: bit for bit what one expert after the other gives, on hostile routings, in one wait each."""

from __future__ import annotations

import pytest
import torch

from moetune_kernels.down import down_reference
from moetune_kernels.fused_moe import fused_moe_reference
from moetune_kernels.gate_up import gate_up_reference
from moetune_kernels.permute import permute_reference
from moetune_kernels.routed_slots import routed_slots
from tests.host_waits import HostWaits

EXPERTS, HIDDEN, INTER = 8, 96, 80
ROUTINGS = {
    "random": lambda: torch.randint(0, EXPERTS, (67, 3), generator=torch.Generator().manual_seed(0)),
    "random-with-holes": lambda: torch.randint(-1, EXPERTS + 1, (97, 3), generator=torch.Generator().manual_seed(1)),
    "first-and-last-expert": lambda: torch.tensor([[0, 7], [7, 0], [0, 7]]),
    "all-tokens-to-one-expert": lambda: torch.full((40, 2), 3),
    "nobody-is-routed": lambda: torch.full((5, 2), -1),
    "ids-far-out-of-range": lambda: torch.tensor([[1, 8], [2_000_000_000, 0], [7, -(2**31)]]),
    "one-token": lambda: torch.tensor([[5, 2]]),
    "no-tokens": lambda: torch.empty((0, 2), dtype=torch.int64),
}


def layer(ids, dtype, seed=7):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(len(ids), HIDDEN, generator=gen).to(dtype)
    w13 = (torch.randn(EXPERTS, 2 * INTER, HIDDEN, generator=gen) / HIDDEN**0.5).to(dtype)
    w2 = (torch.randn(EXPERTS, HIDDEN, INTER, generator=gen) / INTER**0.5).to(dtype)
    return x, w13, w2, torch.rand(ids.shape, generator=gen)


def slots_one_by_one(ids, expert):
    return (ids.flatten() == expert).nonzero().flatten()


def gate_up_one_by_one(x, w13, ids):
    h = torch.zeros((ids.numel(), INTER))
    for expert in range(EXPERTS):
        slots = slots_one_by_one(ids, expert)
        if len(slots):
            gate, up = (x[slots // ids.shape[1]].float() @ w13[expert].float().t()).chunk(2, dim=1)
            h[slots] = torch.nn.functional.silu(gate) * up
    return h


def down_one_by_one(h, w2, weights, ids):
    y = torch.zeros((ids.numel(), HIDDEN))
    for expert in range(EXPERTS):
        slots = slots_one_by_one(ids, expert)
        if len(slots):
            y[slots] = (h[slots].float() @ w2[expert].float().t()) * weights.flatten()[slots, None]
    return y


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(poisoned_memory):
    """A row that no expert writes shows."""


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_slots_are_those_of_every_expert_in_their_order(routing, ids_dtype):
    ids = ROUTINGS[routing]().to(ids_dtype)
    slots, counts = routed_slots(ids, EXPERTS)
    got = [part.tolist() for part in slots.split(counts)]
    assert got == [slots_one_by_one(ids, expert).tolist() for expert in range(EXPERTS)]
    order = permute_reference(ids, EXPERTS, 16)
    assert slots.tolist() == order.slots[: len(slots)].tolist()
    assert list(counts) == order.expert_offsets.diff().tolist()


def test_ids_past_32_bits_are_not_wrapped_into_range():
    slots, counts = routed_slots(torch.tensor([[(1 << 32) + 3, 2]]), EXPERTS)
    assert slots.tolist() == [1]
    assert counts == (0, 0, 1, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_references_are_to_the_bit_what_one_expert_after_the_other_gives(routing, dtype):
    ids = ROUTINGS[routing]()
    x, w13, w2, weights = layer(ids, dtype)
    h = gate_up_reference(x, w13, ids)
    assert torch.equal(h, gate_up_one_by_one(x, w13, ids))
    y = down_reference(h.to(dtype), w2, weights, ids)
    assert torch.equal(y, down_one_by_one(h.to(dtype), w2, weights, ids))


@pytest.mark.parametrize("not_finite", [float("nan"), float("inf")])
def test_a_slot_that_is_not_routed_is_zero_whatever_its_row_and_weight_hold(not_finite):
    ids = torch.tensor([[-1, 8], [2, -1]])
    x, w13, w2, weights = layer(ids, torch.bfloat16)
    x[0], weights[ids < 0], weights[0] = not_finite, not_finite, not_finite
    h = gate_up_reference(x, w13, ids)
    h_in = h.clone()
    h_in[[0, 1, 3]] = not_finite
    y = down_reference(h_in, w2, weights, ids)
    for out in (h, y):
        assert [bool(row.any()) for row in out] == [False, False, True, False]
        assert out.isfinite().all()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_reference_waits_for_the_device_once_however_many_experts_there_are(routing):
    ids = ROUTINGS[routing]()
    x, w13, w2, weights = layer(ids, torch.bfloat16)
    with HostWaits() as waits:
        h = gate_up_reference(x, w13, ids)
    assert waits.count == 1
    with HostWaits() as waits:
        down_reference(h, w2, weights, ids)
    assert waits.count == 1
    with HostWaits() as waits:
        fused_moe_reference(x, w13, w2, weights, ids)
    assert waits.count == 2
    with HostWaits() as waits:
        gate_up_one_by_one(x, w13, ids)
    assert waits.count == EXPERTS  # what would be a wait is seen


def test_experts_without_a_slot_are_not_multiplied(monkeypatch):
    """A decode step touches few of many experts: the others' weights are neither copied nor read."""
    ids = ROUTINGS["first-and-last-expert"]()
    x, w13, w2, weights = layer(ids, torch.bfloat16)
    w13[1:7], w2[1:7] = float("nan"), float("nan")
    multiplied = []
    product = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: multiplied.append(a.shape) or product(a, b))
    assert fused_moe_reference(x, w13, w2, weights, ids).isfinite().all()
    assert multiplied == [(3, HIDDEN)] * 2 + [(3, INTER)] * 2


def test_no_tokens_make_no_output():
    ids = ROUTINGS["no-tokens"]()
    x, w13, w2, weights = layer(ids, torch.bfloat16)
    assert fused_moe_reference(x, w13, w2, weights, ids).shape == (0, HIDDEN)
