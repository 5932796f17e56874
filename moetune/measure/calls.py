"""The runtime's kernel calls on meta tensors: what the compile pool compiles, the same binaries that a layer launches."""

from __future__ import annotations

import torch

from moetune.measure.compiler import KernelJob
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.down.launch import DownOperands, down_calls
from moetune_kernels.gate_up.launch import gate_up_calls
from moetune_kernels.kernel_call import KernelCall
from moetune_kernels.permute.order import SlotOrder
from moetune_kernels.shape import MoEShape, WeightFormat

# Imported once by the process that compiles; every op's kernels come along.
PRELOAD = (
    "moetune.measure.calls",
    "moetune.measure.small_kernels",
    "moetune_kernels.route.launch",
    "moetune_kernels.permute.launch",
    "moetune_kernels.gate_up.launch",
    "moetune_kernels.down.launch",
    "moetune_kernels.combine.launch",
)
COMPILE_TOKENS = 64  # any count: kernels are not specialised on it
MIN_WARP_TILE = 16 * 8  # outputs of one mma.sync; a tile with fewer per warp repeats work across warps
DTYPES = {WeightFormat.BF16: torch.bfloat16, WeightFormat.FP16: torch.float16}


def gemm_job(role: Role, config: MoEKernelConfig, shape: MoEShape, device: DeviceInfo) -> KernelJob:
    """Return the job that compiles one grouped GEMM of ``shape`` for ``device``."""
    ceiling = device.smem_limit if config.smem_size is None else min(config.smem_size, device.smem_limit)
    matrices = 2 if role is Role.GATE_UP else 1
    outputs = config.block_m * config.block_n // config.num_warps
    macs = float(matrices * outputs * config.block_k) if outputs >= MIN_WARP_TILE else None
    return KernelJob(
        build=gemm_calls, args=(role, config, shape), device=device, smem_ceiling=ceiling, macs_per_step=macs
    )


def gemm_calls(role: Role, config: MoEKernelConfig, shape: MoEShape) -> tuple[KernelCall, ...]:
    """Return the calls of one grouped GEMM on meta tensors; the GEMM is the last."""
    slots, dtype = COMPILE_TOKENS * shape.top_k, DTYPES[shape.format]
    order = SlotOrder.empty(slots, shape.local_experts, config.block_m, "meta")
    h = torch.empty((slots, shape.inter), dtype=dtype, device="meta")
    if role is Role.GATE_UP:
        x = torch.empty((COMPILE_TOKENS, shape.hidden), dtype=dtype, device="meta")
        w13 = torch.empty((shape.local_experts, 2 * shape.inter, shape.hidden), dtype=dtype, device="meta")
        return gate_up_calls(x, w13, order, h, config)
    w2 = torch.empty((shape.local_experts, shape.hidden, shape.inter), dtype=dtype, device="meta")
    weights = torch.empty((COMPILE_TOKENS, shape.top_k), dtype=torch.float32, device="meta")
    y = torch.empty((slots, shape.hidden), dtype=dtype, device="meta")
    return down_calls(DownOperands(h, w2, weights, y), order, config)
