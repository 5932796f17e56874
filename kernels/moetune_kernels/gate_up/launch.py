"""Gate-up: grouped GEMM with SwiGLU in its epilogue, one launcher for all structures."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.errors import ShapeError
from moetune_kernels.gate_up.gather import gate_up_gather_kernel
from moetune_kernels.gate_up.tma import gate_up_tma_kernel
from moetune_kernels.gate_up.tma_permute import gate_up_tma_permute_kernel, permute_rows_kernel
from moetune_kernels.grid import device_of, persistent_programs
from moetune_kernels.kernel_call import KernelCall, launch_all
from moetune_kernels.launch_context import launching_on
from moetune_kernels.permute.order import SlotOrder
from moetune_kernels.shape import MoEShape

Calls = tuple[KernelCall, ...]
_COPY_ROWS, _COPY_COLUMNS = 4, 1024  # one row of 1,024 columns is 16 bytes for each of 128 threads


def gate_up(x: torch.Tensor, w13: torch.Tensor, order: SlotOrder, config: MoEKernelConfig) -> torch.Tensor:
    """Compute ``silu(x @ gate.T) * (x @ up.T)`` for every routed slot.

    Args:
        x: [T, H] tokens.
        w13: [E, 2I, H] gate rows, then up rows; K contiguous.
        order: slots in expert order, from ``permute`` with ``block_m=config.block_m``.
        config: the launch choice.

    Returns:
        h [S, I] in expert order; rows of slots that are not routed are not written.

    Raises:
        ShapeError: sizes that do not fit together.
    """
    if x.ndim != 2 or w13.ndim != 3 or w13.shape[1] % 2 or w13.shape[2] != x.shape[1]:
        raise ShapeError(f"gate_up takes x [T, H] and w13 [E, 2I, H], got {tuple(x.shape)} and {tuple(w13.shape)}")
    if order.block_m != config.block_m:
        raise ShapeError(f"order has block_m={order.block_m}, the config {config.block_m}; permute with the config's")
    h = torch.empty((order.slots.numel(), w13.shape[1] // 2), dtype=x.dtype, device=x.device)
    with launching_on(x):
        launch_all(gate_up_calls(x.contiguous(), w13, order, h, config))
    return h


def gate_up_calls(
    x: torch.Tensor, w13: torch.Tensor, order: SlotOrder, h: torch.Tensor, config: MoEKernelConfig
) -> Calls:
    """Return the launches that fill ``h`` [S, I] from contiguous operands; the GEMM is the last."""
    if h.numel() == 0:
        return ()
    return _STRUCTURES[config.structure](x, w13, order, h, config)


def _gather_calls(
    x: torch.Tensor, w13: torch.Tensor, order: SlotOrder, h: torch.Tensor, config: MoEKernelConfig
) -> Calls:
    hidden, inter = x.shape[1], h.shape[1]
    args = (x, w13, h, order.slots, *_blocks(order), hidden, inter, h.shape[0] // x.shape[0], *_tile(config))
    grid = (order.max_blocks * -(-inter // config.block_n),)
    return (KernelCall(gate_up_gather_kernel, grid, args, config.launch_kwargs()),)


def _tma_calls(x: torch.Tensor, w13: torch.Tensor, order: SlotOrder, h: torch.Tensor, config: MoEKernelConfig) -> Calls:
    hidden, inter = x.shape[1], h.shape[1]
    weights = _weight_descriptor(w13, config)
    args = (x, weights, h, order.slots, *_blocks(order), hidden, inter, h.shape[0] // x.shape[0], *_tile(config))
    grid = _persistent_grid(x, w13, order, h, config)
    return (KernelCall(gate_up_tma_kernel, grid, args, config.launch_kwargs()),)


def _tma_permute_calls(
    x: torch.Tensor, w13: torch.Tensor, order: SlotOrder, h: torch.Tensor, config: MoEKernelConfig
) -> Calls:
    slots, hidden, inter = h.shape[0], x.shape[1], h.shape[1]
    rows = torch.empty((slots, hidden), dtype=x.dtype, device=x.device)
    copy = (x, rows, order.slots, slots, hidden, slots // x.shape[0], _COPY_ROWS, _COPY_COLUMNS)
    described = TensorDescriptor(rows, [slots, hidden], [hidden, 1], [config.block_m, config.block_k])
    args = (described, _weight_descriptor(w13, config), h, *_blocks(order), hidden, inter, *_tile(config))
    grid = _persistent_grid(x, w13, order, h, config)
    return (
        KernelCall(permute_rows_kernel, (-(-slots // _COPY_ROWS),), copy, {"num_warps": 4}),
        KernelCall(gate_up_tma_permute_kernel, grid, args, config.launch_kwargs()),
    )


_STRUCTURES: Mapping[Structure, Callable[..., Calls]] = {
    Structure.GATHER: _gather_calls,
    Structure.TMA: _tma_calls,
    Structure.TMA_PERMUTE: _tma_permute_calls,
}


def _weight_descriptor(w13: torch.Tensor, config: MoEKernelConfig) -> TensorDescriptor:
    rows, hidden = w13.shape[0] * w13.shape[1], w13.shape[2]
    return TensorDescriptor(w13, [rows, hidden], [hidden, 1], [config.block_n, config.block_k])


def _blocks(order: SlotOrder) -> tuple[torch.Tensor, ...]:
    return order.block_expert, order.block_row, order.block_end, order.num_blocks


def _tile(config: MoEKernelConfig) -> tuple[int, int, int, int]:
    return config.block_m, config.block_n, config.block_k, config.group_m


def _persistent_grid(
    x: torch.Tensor, w13: torch.Tensor, order: SlotOrder, h: torch.Tensor, config: MoEKernelConfig
) -> tuple[int, ...]:
    shape = MoEShape(hidden=x.shape[1], inter=h.shape[1], local_experts=w13.shape[0], top_k=1)
    programs = persistent_programs(config, device_of(x), shape, Role.GATE_UP)
    return (min(programs, order.max_blocks * -(-h.shape[1] // config.block_n)),)
