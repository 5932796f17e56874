"""What every search is: it is asked for configs and told how they ended. It never sees a clock or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moetune.outcome import Outcome
from moetune_kernels.config import MoEKernelConfig


class Strategy(Protocol):
    """A search over the configs of one GEMM at one token count.

    It asks no config twice, stays inside its terrain, ends (``ask`` returns nothing), gives the same order for the same
    seed and the same answers, and survives failures.
    """

    def ask(self, count: int) -> Sequence[MoEKernelConfig]:
        """Return at most ``count`` configs to try next; none means that the search is over."""
        ...

    def tell(self, config: MoEKernelConfig, outcome: Outcome) -> None:
        """Take the end of one trial that was asked for."""
        ...


@dataclass(frozen=True, slots=True)
class Terrain:
    """Where a strategy may go.

    Args:
        coarse: configs that are compiled already, the most promising first.
        neighbours: legal configs one step from a config, those that change most first.
        polish: how many configs outside ``coarse`` may be asked for; each costs a compile.
    """

    coarse: tuple[MoEKernelConfig, ...]
    neighbours: Callable[[MoEKernelConfig], Sequence[MoEKernelConfig]]
    polish: int = 0


StrategyFactory = Callable[[Terrain, int], Strategy]
