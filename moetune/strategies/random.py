"""Try configs drawn at random: the yardstick of every other search."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from moetune.outcome import Outcome
from moetune.strategies.base import Terrain
from moetune_kernels.config import MoEKernelConfig


class RandomOrder:
    """As many trials as the plan has, drawn from the compiled configs and from as many others as it may compile."""

    def __init__(self, terrain: Terrain, seed: int = 0) -> None:
        random = Random(f"{seed} {terrain.problem.role.value} {terrain.tokens}")
        fresh = random.sample(terrain.reserve, min(terrain.kernels, len(terrain.reserve)))
        pool = list(dict.fromkeys((*terrain.compiled, *fresh)))
        random.shuffle(pool)
        self._waiting = pool[: terrain.trials]

    def ask(self, count: int) -> Sequence[MoEKernelConfig]:
        """Return the next ``count`` configs."""
        asked, self._waiting = self._waiting[: max(count, 0)], self._waiting[max(count, 0) :]
        return asked

    def tell(self, config: MoEKernelConfig, outcome: Outcome) -> None:
        """Learn nothing: the order is drawn."""
