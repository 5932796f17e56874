"""The jobs of the compile pool for a layer's kernels, made without torch: only the processes that compile need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.measure.compiler import KernelJob
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import ORDER_SLOTS, MoEShape

if TYPE_CHECKING:
    from moetune_kernels.kernel_call import KernelCall

# Imported once by the process that compiles; every op's kernels come along.
PRELOAD = (
    "moetune.measure.kernel_jobs",  # what a job unpickles
    "moetune.measure.calls",
    "moetune_kernels.route.launch",
    "moetune_kernels.permute.launch",
    "moetune_kernels.gate_up.launch",
    "moetune_kernels.down.launch",
    "moetune_kernels.combine.launch",
)
MIN_WARP_TILE = 16 * 8  # outputs of one mma.sync; a tile with fewer per warp repeats work across warps


def gemm_job(role: Role, config: MoEKernelConfig, shape: MoEShape, device: DeviceInfo) -> KernelJob:
    """Return the job that compiles one grouped GEMM of ``shape`` for ``device``."""
    ceiling = device.smem_limit if config.smem_size is None else min(config.smem_size, device.smem_limit)
    matrices = 2 if role is Role.GATE_UP else 1
    outputs = config.block_m * config.block_n // config.num_warps
    macs = float(matrices * outputs * config.block_k) if outputs >= MIN_WARP_TILE else None
    return KernelJob(
        build=_gemm_calls, args=(role, config, shape), device=device, smem_ceiling=ceiling, macs_per_step=macs
    )


def small_jobs(shape: MoEShape, block_sizes: tuple[int, ...], device: DeviceInfo) -> list[KernelJob]:
    """Return the jobs that compile route, permute and combine, so that no timed layer waits for a compiler."""
    few = [1 << power for power in range(ORDER_SLOTS.bit_length()) if (1 << power) * shape.top_k <= ORDER_SLOTS]
    many = (ORDER_SLOTS + 1, 1 << 16)  # permute in one launch, and in three
    return [
        KernelJob(build=_small_calls, args=(tokens, block_m, shape), device=device, smem_ceiling=device.smem_limit)
        for block_m in block_sizes
        for tokens in (*few, *many)
    ]


# What a job pickles is the name of its function: these two stand for those in `calls`, which imports torch.


def _gemm_calls(role: Role, config: MoEKernelConfig, shape: MoEShape) -> tuple[KernelCall, ...]:
    from moetune.measure.calls import gemm_calls

    return gemm_calls(role, config, shape)


def _small_calls(tokens: int, block_m: int, shape: MoEShape) -> tuple[KernelCall, ...]:
    from moetune.measure.calls import small_calls

    return small_calls(tokens, block_m, shape)
