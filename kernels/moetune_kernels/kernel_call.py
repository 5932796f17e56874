"""One kernel launch as a value: launched on the GPU, or only compiled, with the very same arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A Triton kernel with its grid, arguments and launch options.

    Built from real tensors it can be launched. Built from tensors on the ``meta`` device it can be compiled without a
    GPU, and the compiled binary lands in the cache entry that the real launch looks up.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def launch(self) -> None:
        """Launch on the current CUDA stream of the current device."""
        self.kernel[self.grid](*self.args, **self.options)

    def warmup(self) -> Any:
        """Compile without launching and return Triton's compiled kernel."""
        return self.kernel.warmup(*self.args, grid=self.grid, **self.options)


def launch_all(calls: tuple[KernelCall, ...]) -> None:
    """Launch calls in order."""
    for call in calls:
        call.launch()
