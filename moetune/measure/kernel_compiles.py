"""The compile half of a live backend: GEMMs in other processes, and once per sweep the small kernels of every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moetune.engine.backend import Kernel
from moetune.measure.calls import PRELOAD, gemm_job
from moetune.measure.compiler import CompilePool, KernelJob
from moetune.measure.small_kernels import small_jobs
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
        self._shape, self._tokens = shape, tokens
        self._pool = CompilePool(workers=workers, preload=PRELOAD)  # it imports while this process goes on
        self._small: dict[int, KernelJob] = {}
        self._held: list[int] = []  # small ones that are to be queued behind the next kernels

    def submit(self, kernels: Iterable[Kernel], device: DeviceInfo) -> None:
        """Queue kernels for ``device``, in their order and before all small ones, and return at once."""
        if not self._small:
            self._small = dict(enumerate(job for _, job in small_jobs(self._shape, device, self._tokens)))
            self._held = list(self._small)
        self._pool.submit((kernel, gemm_job(*kernel, self._shape, device)) for kernel in kernels)
        self._submit_held()

    def ended(self, wait_s: float = 0.0) -> list[tuple[Kernel, Compiled | Failed]]:
        """Return the kernels that ended since the last call; waits ``wait_s`` at most where none has.

        A small kernel that cannot compile shows itself in the first layer.
        """
        self._submit_held()
        return [(key, result) for key, result in self._pool.ended(wait_s) if not isinstance(key, int)]

    def withdraw(self) -> list[Kernel]:
        """Take back the kernels that no process has begun, in their order; the small ones are queued again."""
        keys = self._pool.withdraw()
        self._held += [key for key in keys if isinstance(key, int)]
        return [key for key in keys if not isinstance(key, int)]

    def _submit_held(self) -> None:
        held, self._held = self._held, []
        self._pool.submit((place, self._small[place]) for place in held)

    def close(self) -> None:
        """End the processes; safe to call twice."""
        self._pool.close()
