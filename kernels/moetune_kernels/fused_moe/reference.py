"""The whole layer in plain torch, float32."""

from __future__ import annotations

import torch

from moetune_kernels.combine.reference import combine_reference
from moetune_kernels.down.reference import down_reference
from moetune_kernels.gate_up.reference import gate_up_reference


def fused_moe_reference(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Return [T, H] float32; arguments as :func:`moetune_kernels.fused_moe.fused_moe`."""
    h = gate_up_reference(x, w13, topk_ids)
    y = down_reference(h, w2, topk_weights, topk_ids)
    return combine_reference(y, topk_ids, w13.shape[0])
