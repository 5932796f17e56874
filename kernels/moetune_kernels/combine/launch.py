"""Combine: a token's expert outputs become one row. Deterministic: a fixed order of float32 additions."""

from __future__ import annotations

import torch

from moetune_kernels.combine.kernel import combine_kernel
from moetune_kernels.errors import ShapeError
from moetune_kernels.kernel_call import KernelCall, launch_all
from moetune_kernels.launch_context import launching_on

_BLOCK_H = 1024  # 16 bytes of bf16 for each of 128 threads


def combine(y: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Sum y [S, H] over each token's K slots; slots with an id outside 0..E-1 add nothing. Returns [T, H].

    Raises:
        ShapeError: y does not have one row per slot.
    """
    if y.ndim != 2 or topk_ids.ndim != 2 or y.shape[0] != topk_ids.numel():
        raise ShapeError(f"combine takes y [T * K, H] and ids [T, K], got {tuple(y.shape)} and {tuple(topk_ids.shape)}")
    out = torch.empty((topk_ids.shape[0], y.shape[1]), dtype=y.dtype, device=y.device)
    with launching_on(y):
        launch_all(combine_calls(y.contiguous(), topk_ids.contiguous(), num_experts, out))
    return out


def combine_calls(
    y: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, out: torch.Tensor
) -> tuple[KernelCall, ...]:
    """Return the launch that fills ``out`` [T, H] from contiguous operands."""
    tokens, hidden = out.shape
    if tokens == 0:
        return ()
    block = min(_BLOCK_H, 1 << (hidden - 1).bit_length())
    args = (y, topk_ids, out, num_experts, hidden, topk_ids.shape[1], block)
    return (KernelCall(combine_kernel, (tokens, -(-hidden // block)), args, {"num_warps": 4}),)
