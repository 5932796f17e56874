"""Combine in plain torch, float32."""

from __future__ import annotations

import torch


def combine_reference(y: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return out [T, H] float32 from y [S, H] in slot order."""
    routed = ((topk_ids >= 0) & (topk_ids < num_experts)).flatten()
    rows = y.float().where(routed[:, None], torch.zeros((), device=y.device))
    return rows.view(*topk_ids.shape, y.shape[1]).sum(dim=1)
