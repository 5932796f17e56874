"""Down: grouped GEMM times the router weight, one launcher for all structures."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.down.gather import down_gather_kernel
from moetune_kernels.down.tma import down_tma_kernel
from moetune_kernels.errors import ShapeError, UnsupportedConfigError
from moetune_kernels.grid import device_of, persistent_programs
from moetune_kernels.kernel_call import KernelCall, launch_all
from moetune_kernels.launch_context import launching_on
from moetune_kernels.permute.order import SlotOrder
from moetune_kernels.shape import MoEShape

Calls = tuple[KernelCall, ...]


@dataclass(frozen=True, slots=True)
class DownOperands:
    """What the down GEMM reads and writes: h [S, I], w2 [E, H, I], topk_weights [T, K] float32, y [S, H]."""

    h: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    y: torch.Tensor


def down(
    h: torch.Tensor, w2: torch.Tensor, order: SlotOrder, topk_weights: torch.Tensor, config: MoEKernelConfig
) -> torch.Tensor:
    """Compute ``topk_weights[slot] * (h @ w2.T)`` for every routed slot.

    Args:
        h: [S, I] in expert order, from ``gate_up``.
        w2: [E, H, I]; I contiguous.
        order: slots in expert order, from ``permute`` with ``block_m=config.block_m``.
        topk_weights: [T, K] float32.
        config: the launch choice.

    Returns:
        y [S, H] in slot order (slot t * K + k); rows of slots that are not routed are not written.

    Raises:
        ShapeError: sizes that do not fit together.
    """
    if h.ndim != 2 or w2.ndim != 3 or w2.shape[2] != h.shape[1]:
        raise ShapeError(f"down takes h [S, I] and w2 [E, H, I], got {tuple(h.shape)} and {tuple(w2.shape)}")
    if topk_weights.numel() != h.shape[0] or topk_weights.dtype != torch.float32:
        raise ShapeError(f"topk_weights must be float32 with {h.shape[0]} slots, got {tuple(topk_weights.shape)}")
    if order.block_m != config.block_m:
        raise ShapeError(f"order has block_m={order.block_m}, the config {config.block_m}; permute with the config's")
    y = torch.empty((h.shape[0], w2.shape[1]), dtype=h.dtype, device=h.device)
    with launching_on(h):
        launch_all(down_calls(DownOperands(h, w2, topk_weights.contiguous(), y), order, config))
    return y


def down_calls(operands: DownOperands, order: SlotOrder, config: MoEKernelConfig) -> Calls:
    """Return the launches that fill ``operands.y`` from contiguous operands."""
    if operands.y.numel() == 0:
        return ()
    if config.structure is Structure.GATHER:
        return _gather_calls(operands, order, config)
    if config.structure is Structure.TMA:
        return _tma_calls(operands, order, config)
    raise UnsupportedConfigError(f"down has no structure {config.structure.value}; use gather or tma")


def _gather_calls(operands: DownOperands, order: SlotOrder, config: MoEKernelConfig) -> Calls:
    hidden, inter = operands.y.shape[1], operands.h.shape[1]
    args = (operands.h, operands.w2, operands.y, operands.topk_weights, *_blocks(order), hidden, inter, *_tile(config))
    grid = (order.max_blocks * -(-hidden // config.block_n),)
    return (KernelCall(down_gather_kernel, grid, args, config.launch_kwargs()),)


def _tma_calls(operands: DownOperands, order: SlotOrder, config: MoEKernelConfig) -> Calls:
    h, w2 = operands.h, operands.w2
    slots, inter, (num_experts, hidden) = h.shape[0], h.shape[1], w2.shape[:2]
    rows = TensorDescriptor(h, [slots, inter], [inter, 1], [config.block_m, config.block_k])
    weights = TensorDescriptor(w2, [num_experts * hidden, inter], [inter, 1], [config.block_n, config.block_k])
    args = (rows, weights, operands.y, operands.topk_weights, *_blocks(order), hidden, inter, *_tile(config))
    shape = MoEShape(hidden=hidden, inter=inter, local_experts=num_experts, top_k=1)
    programs = persistent_programs(config, device_of(h), shape, Role.DOWN)
    grid = (min(programs, order.max_blocks * -(-hidden // config.block_n)),)
    return (KernelCall(down_tma_kernel, grid, args, config.launch_kwargs()),)


def _blocks(order: SlotOrder) -> tuple[torch.Tensor, ...]:
    return order.slots, order.block_expert, order.block_row, order.block_end, order.num_blocks


def _tile(config: MoEKernelConfig) -> tuple[int, int, int, int]:
    return config.block_m, config.block_n, config.block_k, config.group_m
