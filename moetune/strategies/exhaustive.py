"""Try every legal config: the truth that other searches are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from moetune.outcome import Outcome
from moetune.strategies.base import Terrain
from moetune_kernels.config import MoEKernelConfig


class Exhaustive:
    """All of the terrain, compiled or not, the most promising first. It knows no limit but a deadline."""

    def __init__(self, terrain: Terrain, seed: int = 0) -> None:
        del seed  # nothing is drawn
        everything = dict.fromkeys((*terrain.compiled, *terrain.reserve))
        self._waiting = sorted(everything, key=lambda config: terrain.guess(config, terrain.tokens))

    def ask(self, count: int) -> Sequence[MoEKernelConfig]:
        """Return the next ``count`` configs."""
        asked, self._waiting = self._waiting[:count], self._waiting[count:]
        return asked

    def tell(self, config: MoEKernelConfig, outcome: Outcome) -> None:
        """Learn nothing: the order is fixed."""
