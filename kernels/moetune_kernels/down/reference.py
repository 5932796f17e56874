"""Down in plain torch, float32."""

from __future__ import annotations

import torch


def down_reference(
    h: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Return y [S, H] float32 in slot order, zero for slots that are not routed.

    Args:
        h: [S, I] in slot order; w2: [E, H, I]; topk_weights and topk_ids: [T, K].
    """
    flat, weights = topk_ids.flatten(), topk_weights.flatten().float()
    y = torch.zeros((flat.numel(), w2.shape[1]), dtype=torch.float32, device=h.device)
    for expert in range(w2.shape[0]):
        slots = (flat == expert).nonzero().flatten()
        if slots.numel():
            y[slots] = (h[slots].float() @ w2[expert].float().t()) * weights[slots, None]
    return y
