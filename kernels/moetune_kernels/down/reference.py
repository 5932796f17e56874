"""Down in plain torch, float32."""

from __future__ import annotations

import torch

from moetune_kernels.routed_slots import routed_slots


def down_reference(
    h: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Return y [S, H] float32 in slot order, zero for slots that are not routed.

    Args:
        h: [S, I] in slot order; w2: [E, H, I]; topk_weights and topk_ids: [T, K].
    """
    slots, counts = routed_slots(topk_ids, w2.shape[0])
    rows, weights = h[slots].float().split(counts), topk_weights.flatten()[slots, None].float()
    y = torch.zeros((topk_ids.numel(), w2.shape[1]), dtype=torch.float32, device=h.device)
    parts = [rows[expert] @ w2[expert].float().t() for expert, count in enumerate(counts) if count]
    if parts:
        y[slots] = torch.cat(parts) * weights
    return y
