"""The entry of a race: which first launches are hopeless."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moetune.outcome import Failed, FailureKind
from moetune_kernels.config import MoEKernelConfig

SLOW_RATIO = 2.5  # a first launch this many times the best one gets no second


@dataclass
class Gate:
    """The race's entry: remembers the fastest first launch, and how many samples follow one of so many microseconds."""

    samples: Callable[[float], int]
    best_us: float = float("inf")
    holder: MoEKernelConfig | None = None

    def open_again(self) -> None:
        """Forget the pace, because the config that set it computes the wrong thing."""
        self.best_us, self.holder = float("inf"), None

    def refuse(self, config: MoEKernelConfig, first_us: float) -> Failed | None:
        """Return a failure when a first launch is hopeless against the best so far."""
        best_us = self.best_us
        if first_us < best_us:
            self.best_us, self.holder = first_us, config
        if first_us <= SLOW_RATIO * best_us:
            return None
        return Failed(
            FailureKind.SLOW,
            f"its first launch took {first_us:.1f} us, over {SLOW_RATIO} times the best so far ({best_us:.1f} us)",
        )
