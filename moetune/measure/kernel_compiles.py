"""The compile half of a live backend: GEMMs in other processes, and once per sweep the small kernels of every layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from moetune.measure.calls import PRELOAD, gemm_job
from moetune.measure.compiler import CompilePool, KernelJob
from moetune.measure.small_kernels import small_jobs
from moetune.outcome import Compiled, Failed
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import MoEShape

FIRST_COUNTS = 2  # whose small kernels are compiled before any GEMM; the others' have time


class KernelCompiles:
    """Compiles one layer's kernels; never touches a GPU, so that it works while another process measures.

    Args:
        shape: the layer.
        workers: compile processes; one less than the cores when None.
        tokens: the sweep's token counts in the order of their turns, whose small kernels are compiled; any when empty.
    """

    def __init__(self, shape: MoEShape, workers: int | None = None, tokens: Sequence[int] = ()) -> None:
        self._shape, self._tokens = shape, tokens
        self._pool = CompilePool(workers=workers, preload=PRELOAD)  # it imports while this process goes on
        self._small: list[tuple[int, KernelJob]] | None = None

    def compile(
        self, role: Role, configs: Sequence[MoEKernelConfig], device: DeviceInfo
    ) -> Iterator[tuple[MoEKernelConfig, Compiled | Failed]]:
        """Compile for ``device`` and yield each config as it ends, in any order."""
        gemms = ((config, gemm_job(role, config, self._shape, device)) for config in configs)
        jobs: Iterator[tuple[MoEKernelConfig | None, KernelJob]] = itertools.chain(
            self._small_jobs(device, self._tokens[:FIRST_COUNTS]), gemms, self._small_jobs(device, self._tokens)
        )
        for config, result in self._pool.compile(jobs):
            if config is not None:  # a small kernel that cannot compile shows itself in the first layer
                yield config, result

    def _small_jobs(self, device: DeviceInfo, counts: Sequence[int]) -> Iterator[tuple[None, KernelJob]]:
        """Yield what ``counts`` need and nobody asked for yet."""
        if self._small is None:
            self._small = small_jobs(self._shape, device, self._tokens)
        while self._small and (not counts or self._small[0][0] in counts):
            yield None, self._small.pop(0)[1]

    def close(self) -> None:
        """End the processes; safe to call twice."""
        self._pool.close()
