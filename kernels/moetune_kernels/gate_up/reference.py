"""Gate-up in plain torch, float32."""

from __future__ import annotations

import torch

from moetune_kernels.routed_slots import routed_slots


def gate_up_reference(x: torch.Tensor, w13: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """Return h [S, I] float32 in slot order (slot t * K + k), zero for slots that are not routed.

    Args:
        x: [T, H]; w13: [E, 2I, H]; topk_ids: [T, K], ids outside 0..E-1 are not routed.
    """
    slots, counts = routed_slots(topk_ids, w13.shape[0])
    rows = x[slots // topk_ids.shape[1]].float().split(counts)
    h = torch.zeros((topk_ids.numel(), w13.shape[1] // 2), dtype=torch.float32, device=x.device)
    # An expert is two launches, its weights in float32 and the product: with few rows each, launching is all that takes time.
    parts = [rows[expert] @ w13[expert].float().t() for expert, count in enumerate(counts) if count]
    if parts:
        gate_and_up = torch.cat(parts)
        del parts  # as large again
        h[slots] = _swiglu(gate_and_up)
    return h


def _swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_and_up.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up
