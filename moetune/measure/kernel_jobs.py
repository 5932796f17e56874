"""The jobs of the compile pool for a layer's kernels, made without torch: only the processes that compile need it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.measure.compile_job import KernelJob
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import MoEShape

if TYPE_CHECKING:
    from moetune_kernels.kernel_call import KernelCall

# Imported once by the process that compiles; every op's kernels come along.
PRELOAD = (
    "moetune.measure.kernel_jobs",  # what a job unpickles
    "moetune.measure.calls",
    "moetune.measure.small_kernels",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallKernels:
    """The job that compiles a part of the small kernels (route, permute, combine) that a sweep launches.

    Which these are takes torch to find out, so each part's process finds it out for itself, in milliseconds.

    Args:
        shape: the layer.
        device: what to compile for.
        tokens: the sweep's counts in the order of their turns; any that a layer may have when empty.
        part, parts: of all kernels, in the order of the counts that need them first, every ``parts``-th from ``part`` on.
    """

    shape: MoEShape
    device: DeviceInfo
    tokens: tuple[int, ...] = ()
    part: int = 0
    parts: int = 1

    def compile(self) -> None:
        """Compile them; one that cannot be compiled shows itself in the first layer that launches it."""
        from moetune.measure.small_kernels import small_jobs

        for _, job in small_jobs(self.shape, self.device, self.tokens)[self.part :: self.parts]:
            with suppress(Exception):
                job.built()


# What a job pickles is the name of its function: these two stand for those in modules that import torch.


def _gemm_calls(role: Role, config: MoEKernelConfig, shape: MoEShape) -> tuple[KernelCall, ...]:
    from moetune.measure.calls import gemm_calls

    return gemm_calls(role, config, shape)


def small_call(tokens: int, block_m: int, shape: MoEShape, place: int) -> tuple[KernelCall]:
    """Return one of a layer's small kernels, see :func:`moetune.measure.small_kernels.small_calls`."""
    from moetune.measure.small_kernels import small_calls

    return (small_calls(tokens, block_m, shape)[place],)
