"""One layer taken apart: every launch of a plan, named by the piece of the layer that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from moetune.measure.inputs import ExpertWeights, Rows
    from moetune.measure.router import Router
    from moetune_kernels.kernel_call import KernelCall
    from moetune_kernels.permute.order import SlotOrder
    from moetune_kernels.plan import LayerPlan
    from moetune_kernels.shape import MoEShape

SEED = 0  # a sweep's own, so that counted launches route the very rows that were timed


class Part(Enum):
    """Which piece of the layer a launch belongs to."""

    ROUTING = "routing"  # route and permute: one to four launches
    COPY = "copy"  # rows into expert order, before a tma_permute gate-up
    GATE_UP = "gate_up"
    DOWN = "down"
    COMBINE = "combine"


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The launches of one layer in order, the rows that go in, and the ids [T, K] that the router chose."""

    calls: tuple[tuple[Part, KernelCall], ...]
    rows: Rows
    topk_ids: torch.Tensor

    def of(self, part: Part) -> tuple[KernelCall, ...]:
        """Return the launches of one part, in order; none where the plan has no such part."""
        return tuple(call for owner, call in self.calls if owner is part)

    def counts(self, local_experts: int) -> tuple[int, ...]:
        """Return how many slots each local expert owns; waits for the device."""
        import torch

        flat = self.topk_ids.flatten().long()
        owned = flat[(flat >= 0) & (flat < local_experts)]
        return tuple(torch.bincount(owned, minlength=local_experts).tolist())

    @property
    def present(self) -> tuple[Part, ...]:
        """The parts that have a launch, in the order of the layer."""
        return tuple(part for part in Part if self.of(part))


def resident_weights(shape: MoEShape, resident: int | None, device: torch.device) -> ExpertWeights:
    """Make the weights of ``resident`` experts (None: of all), the same in every process."""
    from moetune.measure.inputs import make_weights

    held = shape.local_experts if resident is None else resident
    total = shape.local_experts if shape.experts is None else shape.experts
    return make_weights(replace(shape, local_experts=held, experts=total), device, SEED)


def layer_parts(
    shape: MoEShape, tokens: int, plan: LayerPlan, weights: ExpertWeights, router: Router | None = None
) -> LayerParts:
    """Make a layer's inputs and what lies between its kernels, route once, and return every launch.

    Routing runs here, because the row blocks of the GEMMs depend on it. Each launch may then be repeated in any order:
    the GEMMs read an order of their own, which a repeated routing does not touch. Inputs are seeded: two processes
    route alike.

    Args:
        shape: the layer.
        tokens: T, at least 1.
        plan: the launch choices.
        weights: on one CUDA device that is current; fewer experts than the layer has are shared, expert e reading the
            weights of ``e % len(w2)``.
        router: how the rows choose experts, its popular ones those of ``SEED``; uniformly when None.
    """
    import torch

    from moetune.measure.inputs import make_rows, rows_seed
    from moetune_kernels.combine.launch import combine_calls
    from moetune_kernels.down.launch import DownOperands, down_calls
    from moetune_kernels.fused_moe.routing import routing_calls
    from moetune_kernels.gate_up.launch import gate_up_calls
    from moetune_kernels.kernel_call import launch_all
    from moetune_kernels.permute.order import SlotOrder

    device, experts = weights.w2.device, shape.local_experts
    rows = make_rows(shape, tokens, device, rows_seed(SEED, tokens), router)
    topk_weights = torch.empty((tokens, shape.top_k), dtype=torch.float32, device=device)
    topk_ids = torch.empty((tokens, shape.top_k), dtype=torch.int32, device=device)
    order = SlotOrder.empty(topk_ids.numel(), experts, plan.block_m, device)
    routing = routing_calls(rows.logits, (topk_weights, topk_ids), experts, order, renormalize=True)
    launch_all(routing)
    gemm_order = _resident(order, weights.w2.shape[0])
    # Zeros, not empty: rows of slots that this rank does not own are never written.
    h = torch.zeros((topk_ids.numel(), shape.inter), dtype=rows.x.dtype, device=device)
    y = torch.zeros((topk_ids.numel(), shape.hidden), dtype=rows.x.dtype, device=device)
    gate_up = gate_up_calls(rows.x, weights.w13, gemm_order, h, plan.gate_up)
    down = down_calls(DownOperands(h, weights.w2, topk_weights, y), gemm_order, plan.down)
    combine = combine_calls(y, topk_ids, experts, torch.empty_like(rows.x))
    named = (
        (Part.ROUTING, routing),
        (Part.COPY, gate_up[:-1]),
        (Part.GATE_UP, gate_up[-1:]),
        (Part.DOWN, down),
        (Part.COMBINE, combine),
    )
    return LayerParts(tuple((part, call) for part, calls in named for call in calls), rows, topk_ids)


def _resident(order: SlotOrder, resident: int) -> SlotOrder:
    """Return a copy of the order whose blocks read only the ``resident`` experts that are in memory."""
    owner = order.block_expert
    return replace(
        order,
        slots=order.slots.clone(),
        block_expert=owner.where(owner < 0, owner % resident),
        block_row=order.block_row.clone(),
        block_end=order.block_end.clone(),
        num_blocks=order.num_blocks.clone(),
        expert_offsets=order.expert_offsets.clone(),
    )
