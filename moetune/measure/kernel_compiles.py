"""The compile half of a live backend: GEMMs in other processes, and once per sweep the small kernels of every layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from moetune.measure.compiler import CompilePool, KernelJob
from moetune.measure.kernel_jobs import PRELOAD, gemm_job, small_jobs
from moetune.outcome import Compiled, Failed
from moetune_kernels.config import BLOCK_SIZES, MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import MoEShape


class KernelCompiles:
    """Compiles one layer's kernels; never touches a GPU, so that it works while another process measures.

    Args:
        shape: the layer.
        workers: compile processes; one less than the cores when None.
    """

    def __init__(self, shape: MoEShape, workers: int | None = None) -> None:
        self._shape = shape
        self._pool = CompilePool(workers=workers, preload=PRELOAD)  # it imports while this process goes on
        self._small_compiled = False

    def compile(
        self, role: Role, configs: Sequence[MoEKernelConfig], device: DeviceInfo
    ) -> Iterator[tuple[MoEKernelConfig, Compiled | Failed]]:
        """Compile for ``device`` and yield each config as it ends, in any order."""
        gemms = ((config, gemm_job(role, config, self._shape, device)) for config in configs)
        jobs: Iterator[tuple[MoEKernelConfig | None, KernelJob]] = itertools.chain(self._small_jobs(device), gemms)
        for config, result in self._pool.compile(jobs):
            if config is not None:  # a small kernel that cannot compile shows itself in the first layer
                yield config, result

    def _small_jobs(self, device: DeviceInfo) -> Iterator[tuple[None, KernelJob]]:
        if not self._small_compiled:
            self._small_compiled = True
            for job in small_jobs(self._shape, BLOCK_SIZES, device):
                yield None, job

    def close(self) -> None:
        """End the processes; safe to call twice."""
        self._pool.close()
