"""The compile half of a live backend: GEMMs in other processes, and once per sweep the small kernels of every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from moetune.engine.backend import Kernel
from moetune.measure.compiler import CompilePool, default_workers
from moetune.measure.kernel_jobs import PRELOAD, SmallKernels, gemm_job
from moetune.outcome import Compiled, Failed
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import MoEShape


def compile_pool(workers: int | None = None) -> CompilePool:
    """Return a pool for the kernels of any layer, whose process imports what they need while this one goes on."""
    return CompilePool(workers=workers, preload=PRELOAD)


class KernelCompiles:
    """Compiles one layer's kernels; never touches a GPU, so that it works while another process measures.

    Args:
        shape: the layer.
        workers: compile processes; one less than the cores when None.
        tokens: the sweep's token counts in the order of their turns, whose small kernels are compiled; any when empty.
        pool: of :func:`compile_pool` with as many processes; closed with this. A new one when None.
    """

    def __init__(
        self,
        shape: MoEShape,
        workers: int | None = None,
        tokens: Sequence[int] = (),
        pool: CompilePool | None = None,
    ) -> None:
        self._shape, self._tokens = shape, tuple(tokens)
        self._pool = pool or compile_pool(workers)
        self._parts = workers or default_workers()
        self._small: list[SmallKernels] = []

    def submit(self, kernels: Iterable[Kernel], device: DeviceInfo) -> None:
        """Queue kernels for ``device``, in their order, and return at once; before the first ones all small kernels.

        These are compiled in no time, and every kernel's first launch waits for one of them.
        """
        if not self._small:
            of_all = SmallKernels(shape=self._shape, device=device, tokens=self._tokens, parts=self._parts)
            self._small = [replace(of_all, part=part) for part in range(self._parts)]
            self._pool.submit(enumerate(self._small))
        self._pool.submit((kernel, gemm_job(*kernel, self._shape, device)) for kernel in kernels)

    def ended(self, wait_s: float = 0.0) -> list[tuple[Kernel, Compiled | Failed]]:
        """Return the kernels that ended since the last call; waits ``wait_s`` at most where none has."""
        return [(key, result) for key, result in self._pool.ended(wait_s) if not isinstance(key, int)]

    def withdraw(self) -> list[Kernel]:
        """Take back the kernels that no process has begun, in their order; the small ones stay queued."""
        keys = self._pool.withdraw()
        self._pool.submit((key, self._small[key]) for key in keys if isinstance(key, int))
        return [key for key in keys if not isinstance(key, int)]

    def close(self) -> None:
        """End the processes; safe to call twice."""
        self._pool.close()
