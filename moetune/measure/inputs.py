"""Random inputs on the GPU, seeded, and what float32 makes of them.

Weights are made once per sweep and serve every token count; x, logits and the references are made per token count.
Scales keep every intermediate near one: weights are normal over the square root of their inner dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from moetune.measure.calls import DTYPES
from moetune.measure.guarded import GUARD_ROWS
from moetune.measure.router import Router, UniformRouter
from moetune.models.roofline import total_experts
from moetune.outcome import Failed, FailureKind
from moetune_kernels.down import down_reference
from moetune_kernels.fused_moe.reference import fused_moe_reference
from moetune_kernels.gate_up import gate_up_reference
from moetune_kernels.kernel_call import launch_all
from moetune_kernels.permute.launch import permute_calls
from moetune_kernels.permute.order import SlotOrder
from moetune_kernels.route import route_reference
from moetune_kernels.routed_slots import routed_slots
from moetune_kernels.shape import ACTIVATION_BYTES, MoEShape

SPARE_BYTES = 2 << 30  # flush buffers, odd problems, CUDA's own; the float32 copies of one expert are counted apart
DRAWS = 32
ROUTINGS = 6  # of 2 of 8 experts and 4 tokens, draws touch 3 to 8: a plan can win at 5 and lose at 6 (H200)
SURELY_ALL = 16  # slots of the least used expert at which it stays untouched once in ten million draws
LOST_AMONG_OTHERS = 128  # slots per expert at which one that is touched or not is no matter, however rare it is
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One layer's weights: w13 [E, 2I, H] (gate rows, then up rows) and w2 [E, H, I]."""

    w13: torch.Tensor
    w2: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """What changes with every token count and seed: x [T, H] and router logits [T, E_total]."""

    x: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class KernelTruth:
    """Inputs and float32 outputs of both GEMMs at one token count.

    Args:
        rows: x and logits.
        topk_weights: [T, K] float32.
        topk_ids: [T, K] int32.
        slots: [R] slot id at each sorted position, routed slots only.
        counts: slots of each local expert.
        h_in: [S, I] what down reads, in sorted positions: the reference rounded to 16 bits, zero past R.
        h: [R, I] float32, what gate-up must write in sorted positions.
        y: [S, H] float32, what down must write in slot order.
    """

    rows: Rows
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    slots: torch.Tensor
    counts: tuple[int, ...]
    h_in: torch.Tensor
    h: torch.Tensor
    y: torch.Tensor

    @property
    def routed(self) -> int:
        """Slots that local experts own."""
        return len(self.slots)

    @property
    def touched(self) -> int:
        """Local experts that own a slot."""
        return sum(count > 0 for count in self.counts)


def weights_bytes(shape: MoEShape) -> int:
    """Return the bytes of all local experts' weights."""
    return shape.local_experts * shape.expert_bytes


def token_bytes(shape: MoEShape, tokens: int) -> int:
    """Return the bytes that one token count needs at its peak: rows, h and y in 16 bits and in float32, one expert."""
    slots = tokens * shape.top_k + 2 * GUARD_ROWS
    rows = 3 * tokens * shape.hidden * (ACTIVATION_BYTES + _FLOAT32_BYTES)
    inner = slots * shape.inter * (3 * ACTIVATION_BYTES + 4 * _FLOAT32_BYTES)
    outer = slots * shape.hidden * (3 * ACTIVATION_BYTES + 4 * _FLOAT32_BYTES)
    one_expert = 3 * shape.hidden * shape.inter * _FLOAT32_BYTES
    return rows + inner + outer + one_expert


def why_no_room(needed: int, what: str, device: torch.device) -> Failed | None:
    """Return the failure when ``needed`` bytes for ``what`` are more than the device has free, else None."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = free + cached - SPARE_BYTES
    if needed <= available:
        return None
    gib = 1 << 30
    return Failed(
        FailureKind.RESOURCES,
        f"{what} need {needed / gib:.1f} GiB of GPU memory, {max(available, 0) / gib:.1f} GiB are free; "
        "use fewer experts or tokens, --tp or --ep, or free the GPU",
    )


def make_weights(shape: MoEShape, device: torch.device, seed: int) -> ExpertWeights:
    """Make the weights in place, expert by expert: at no time is more than the weights themselves in memory."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype, experts, hidden, inter = DTYPES[shape.format], shape.local_experts, shape.hidden, shape.inter
    w13 = torch.empty((experts, 2 * inter, hidden), dtype=dtype, device=device)
    w2 = torch.empty((experts, hidden, inter), dtype=dtype, device=device)
    for expert in range(experts):
        w13[expert].normal_(0.0, 1 / math.sqrt(hidden), generator=generator)
        w2[expert].normal_(0.0, 1 / math.sqrt(inter), generator=generator)
    return ExpertWeights(w13, w2)


def rows_seed(seed: int, tokens: int) -> int:
    """Return the seed of the rows of one token count: whoever times and whoever counts launches must route alike."""
    return seed * 1_000_033 + tokens


def make_rows(shape: MoEShape, tokens: int, device: torch.device, seed: int, router: Router | None = None) -> Rows:
    """Make x and logits; without a ``router`` they route uniformly at random."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = DTYPES[shape.format]
    x = torch.randn((tokens, shape.hidden), dtype=dtype, device=device, generator=generator)
    return Rows(x, (router or UniformRouter(total_experts(shape))).logits(tokens, generator, dtype))


def other_routings(
    shape: MoEShape, tokens: int, device: torch.device, seed: int, router: Router | None = None
) -> list[torch.Tensor]:
    """Return router logits [T, E_total] that touch other numbers of local experts: the fewest, the most, some between.

    How many experts a few tokens touch is luck, and it decides how many bytes and tiles there are. One of each number
    that ``DRAWS`` draws of the same distribution touch, ``ROUTINGS`` at most; none where all draws touch as many.
    """
    router = router or UniformRouter(total_experts(shape))
    slots = tokens * shape.top_k
    if slots >= min(SURELY_ALL / router.rarest_share, LOST_AMONG_OTHERS * total_experts(shape)):
        return []
    generator, dtype = torch.Generator(device).manual_seed(seed), DTYPES[shape.format]
    states, touched = [], []
    for _ in range(DRAWS):
        states.append(generator.get_state())
        touched.append(_touched(router.logits(tokens, generator, dtype), shape))
    # One wait for all counts. Those few draws that are chosen are made again: kept until then, all take much memory.
    state_of = dict(zip(torch.stack(touched).tolist(), states, strict=True))
    counts = sorted(state_of)
    chosen = min(len(counts), ROUTINGS)
    places = [round(place * (len(counts) - 1) / (chosen - 1)) for place in range(chosen)] if chosen > 1 else []
    return [router.logits(tokens, generator.set_state(state_of[counts[place]]), dtype) for place in places]


def _touched(logits: torch.Tensor, shape: MoEShape) -> torch.Tensor:
    """Return on the device how many local experts the top-k of ``logits`` [T, E_total] are."""
    ids = logits.topk(shape.top_k, dim=1).indices.flatten()
    is_touched = torch.zeros(logits.shape[1], dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return is_touched[: shape.local_experts].sum()


def kernel_truth(shape: MoEShape, weights: ExpertWeights, rows: Rows) -> KernelTruth:
    """Compute what both GEMMs must write for rows that their logits route, in float32, one expert at a time."""
    return routed_truth(weights, rows, *route_reference(rows.logits, shape.top_k))


def routed_truth(weights: ExpertWeights, rows: Rows, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> KernelTruth:
    """Compute the same for any routing [T, K]: more than one slot of a token per expert, ids outside 0..E-1."""
    slots, counts = routed_slots(topk_ids, weights.w13.shape[0])
    h_by_slot = gate_up_reference(rows.x, weights.w13, topk_ids)
    h = h_by_slot[slots]
    rounded = h_by_slot.to(rows.x.dtype)
    del h_by_slot
    y = down_reference(rounded, weights.w2, topk_weights, topk_ids)
    h_in = torch.zeros_like(rounded)
    h_in[: len(slots)] = rounded[slots]
    return KernelTruth(rows, topk_weights, topk_ids, slots, counts, h_in, h, y)


def layer_truth(shape: MoEShape, weights: ExpertWeights, rows: Rows) -> torch.Tensor:
    """Compute what the whole layer must return: [T, H] float32."""
    topk_weights, topk_ids = route_reference(rows.logits, shape.top_k)
    return fused_moe_reference(rows.x, weights.w13, weights.w2, topk_weights, topk_ids)


def slot_order(shape: MoEShape, topk_ids: torch.Tensor, block_m: int) -> SlotOrder:
    """Run the runtime's own permutation of ``topk_ids`` [T, K] and return the slot order that it wrote."""
    order = SlotOrder.empty(topk_ids.numel(), shape.local_experts, block_m, topk_ids.device)
    launch_all(permute_calls(topk_ids, shape.local_experts, order))
    return order
