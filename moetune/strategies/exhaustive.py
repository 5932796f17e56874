"""Try every compiled config, in the given order."""

from __future__ import annotations

from collections.abc import Sequence

from moetune.outcome import Outcome
from moetune.strategies.base import Terrain
from moetune_kernels.config import MoEKernelConfig


class Exhaustive:
    """All of the terrain's compiled configs, the most promising first."""

    def __init__(self, terrain: Terrain, seed: int = 0) -> None:
        del seed  # nothing is drawn
        self._waiting = list(terrain.coarse)

    def ask(self, count: int) -> Sequence[MoEKernelConfig]:
        """Return the next ``count`` configs."""
        asked, self._waiting = self._waiting[:count], self._waiting[count:]
        return asked

    def tell(self, config: MoEKernelConfig, outcome: Outcome) -> None:
        """Learn nothing: the order is fixed."""
