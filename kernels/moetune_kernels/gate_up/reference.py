"""Gate-up in plain torch, float32."""

from __future__ import annotations

import torch


def gate_up_reference(x: torch.Tensor, w13: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """Return h [S, I] float32 in slot order (slot t * K + k), zero for slots that are not routed.

    Args:
        x: [T, H]; w13: [E, 2I, H]; topk_ids: [T, K], ids outside 0..E-1 are not routed.
    """
    flat, top_k = topk_ids.flatten(), topk_ids.shape[1]
    h = torch.zeros((flat.numel(), w13.shape[1] // 2), dtype=torch.float32, device=x.device)
    for expert in range(w13.shape[0]):
        slots = (flat == expert).nonzero().flatten()
        if slots.numel():
            gate, up = (x[slots // top_k].float() @ w13[expert].float().t()).chunk(2, dim=1)
            h[slots] = torch.nn.functional.silu(gate) * up
    return h
