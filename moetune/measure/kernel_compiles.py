"""The compile half of a live backend: GEMMs in other processes, and once per sweep the small kernels of every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moetune.engine.backend import Kernel
from moetune.measure.compiler import CompilePool, Job
from moetune.measure.kernel_jobs import PRELOAD, SmallKernels, gemm_job
from moetune.outcome import Compiled, Failed
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import MoEShape


class KernelCompiles:
    """Compiles one layer's kernels; never touches a GPU, so that it works while another process measures.

    Args:
        shape: the layer.
        workers: compile processes; one less than the cores when None.
        tokens: the sweep's token counts in the order of their turns, whose small kernels are compiled; any when empty.
    """

    def __init__(self, shape: MoEShape, workers: int | None = None, tokens: Sequence[int] = ()) -> None:
        self._shape, self._tokens = shape, tuple(tokens)
        self._pool = CompilePool(workers=workers, preload=PRELOAD)  # it imports while this process goes on
        self._small: dict[int, Job] = {}
        self._held: list[int] = []  # small ones that are to be queued behind the next kernels

    def submit(self, kernels: Iterable[Kernel], device: DeviceInfo) -> None:
        """Queue kernels for ``device``, in their order and before all small ones, and return at once."""
        if not self._small:
            self._take_small([SmallKernels(shape=self._shape, device=device, tokens=self._tokens)])
        self._pool.submit((kernel, gemm_job(*kernel, self._shape, device)) for kernel in kernels)
        self._submit_held()

    def ended(self, wait_s: float = 0.0) -> list[tuple[Kernel, Compiled | Failed]]:
        """Return the kernels that ended since the last call; waits ``wait_s`` at most where none has.

        A small kernel that cannot compile shows itself in the first layer.
        """
        self._submit_held()
        found = self._pool.ended(wait_s)
        for key, result in found:
            if isinstance(key, int) and isinstance(result, list):
                self._take_small(result)
        self._submit_held()
        return [(key, result) for key, result in found if not isinstance(key, int)]

    def withdraw(self) -> list[Kernel]:
        """Take back the kernels that no process has begun, in their order; the small ones are queued again."""
        keys = self._pool.withdraw()
        self._held += [key for key in keys if isinstance(key, int)]
        return [key for key in keys if not isinstance(key, int)]

    def _take_small(self, jobs: Sequence[Job]) -> None:
        places = range(len(self._small), len(self._small) + len(jobs))
        self._small.update(zip(places, jobs, strict=True))
        self._held += places

    def _submit_held(self) -> None:
        held, self._held = self._held, []
        self._pool.submit((place, self._small[place]) for place in held)

    def close(self) -> None:
        """End the processes; safe to call twice."""
        self._pool.close()
