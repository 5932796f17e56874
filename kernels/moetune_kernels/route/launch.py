"""Route tokens to experts: softmax top-k, one launch."""

from __future__ import annotations

import torch

from moetune_kernels.errors import ShapeError, shown
from moetune_kernels.kernel_call import KernelCall, launch_all
from moetune_kernels.launch_context import check_device, check_tensor, launching_on
from moetune_kernels.permute.order import SlotOrder
from moetune_kernels.route.kernel import route_kernel, route_order_kernel, select_experts
from moetune_kernels.shape import MAX_EXPERTS, MAX_TOP_K

FEW_TOKENS = 256  # up to here a program is one warp, so that every token can have a scheduler of its own
_TILE = 256  # logits of one warp: 8 per thread
_COMPARED = 2048  # slots x experts that one warp compares: 64 per thread

# Triton 3.6 hashes a kernel with the constants of the functions that it calls, but only of those that were hashed before:
# whichever of both kernels a process launches first would get another hash than in the next process, and miss its cache.
_ = getattr(select_experts, "cache_key", None)  # the interpreter hashes nothing


def route(logits: torch.Tensor, top_k: int, *, renormalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick each token's experts by softmax.

    Args:
        logits: [T, E] router scores; bfloat16, float16 or float32; any strides. NaN counts as -inf.
        top_k: K, experts per token, at most 16 and at most E.
        renormalize: make a token's weights sum to one.

    Returns:
        Weights [T, K] float32 and ids [T, K] int32, by falling weight; equal logits go to the lowest id.

    Raises:
        ShapeError: logits that are not [T, E], or sizes out of range.
        UnsupportedDeviceError: CPU tensors outside Triton's interpreter.
    """
    check_logits(logits, top_k)
    check_device(logits, "logits")
    weights = torch.empty((logits.shape[0], top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((logits.shape[0], top_k), dtype=torch.int32, device=logits.device)
    with launching_on(logits):
        launch_all(route_calls(logits.contiguous(), weights, ids, renormalize))
    return weights, ids


def check_logits(logits: torch.Tensor, top_k: int) -> None:
    """Raise ShapeError where the router cannot run."""
    check_tensor(logits, "logits")
    if logits.ndim != 2 or logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ShapeError(
            f"logits must be [T, E] bfloat16, float16 or float32, got {tuple(logits.shape)} {logits.dtype}"
        )
    if not 1 <= logits.shape[1] <= MAX_EXPERTS:
        raise ShapeError(f"logits must have 1 to {MAX_EXPERTS} experts, got {logits.shape[1]}")
    check_top_k(top_k, logits.shape[1])


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raise ShapeError for what is no count of experts that a token may choose."""
    if type(top_k) is not int or not 1 <= top_k <= min(MAX_TOP_K, num_experts):
        raise ShapeError(
            f"top_k must be a whole number from 1 to min({MAX_TOP_K}, {num_experts} experts), got {shown(top_k)}"
        )


def route_calls(
    logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, renormalize: bool
) -> tuple[KernelCall, ...]:
    """Return the launch that fills ``weights`` and ``ids`` [T, K] from contiguous ``logits`` [T, E]."""
    tokens, num_experts = logits.shape
    if tokens == 0:
        return ()
    experts = _power_of_two(num_experts)
    warps = 1 if tokens <= FEW_TOKENS else 4
    rows = max(1, warps * _TILE // experts)
    args = (logits, weights, ids, tokens, num_experts, ids.shape[1], renormalize, rows, experts)
    return (
        KernelCall(route_kernel, (-(-tokens // rows),), (*args, _power_of_two(ids.shape[1])), {"num_warps": warps}),
    )


def route_order_calls(
    logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, renormalize: bool, order: SlotOrder
) -> tuple[KernelCall, ...]:
    """Return the one launch that routes and orders at most 64 slots."""
    tokens, num_experts = logits.shape
    rows, experts, columns = _power_of_two(tokens), _power_of_two(num_experts), _power_of_two(ids.shape[1])
    args = (
        logits, weights, ids,
        order.slots, order.expert_offsets, order.block_expert, order.block_row, order.block_end, order.num_blocks,
        tokens, order.max_blocks, num_experts, ids.shape[1], renormalize, order.block_m,
        rows, experts, columns, rows * columns,
    )  # fmt: skip
    warps = min(16, max(1, rows * experts // _TILE, rows * columns // 16, rows * columns * experts // _COMPARED))
    return (KernelCall(route_order_kernel, (1,), args, {"num_warps": warps}),)


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
