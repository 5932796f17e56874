"""How router logits become a slot order: the one place that chooses between one launch and several."""

from __future__ import annotations

import torch

from moetune_kernels.kernel_call import KernelCall
from moetune_kernels.permute.launch import permute_calls
from moetune_kernels.permute.order import SlotOrder
from moetune_kernels.route.launch import route_calls, route_order_calls
from moetune_kernels.shape import ORDER_SLOTS


def routing_calls(
    logits: torch.Tensor,
    topk: tuple[torch.Tensor, torch.Tensor],
    num_experts: int,
    order: SlotOrder,
    *,
    renormalize: bool,
) -> tuple[KernelCall, ...]:
    """Return the launches that fill ``topk`` and ``order`` from logits.

    Args:
        logits: [T, E_total] contiguous; a rank that holds fewer experts than the router scores leaves the rest unrouted.
        topk: (weights [T, K] float32, ids [T, K] int32), written.
        num_experts: E, the experts that this rank holds: ids 0..E-1.
        order: written.
        renormalize: make a token's weights sum to one.
    """
    weights, ids = topk
    if ids.numel() <= ORDER_SLOTS and logits.shape[1] == num_experts:
        return route_order_calls(logits, weights, ids, renormalize, order)
    return (*route_calls(logits, weights, ids, renormalize), *permute_calls(ids, num_experts, order))
