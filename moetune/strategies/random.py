"""Try compiled configs in a seeded random order: the yardstick of every other search."""

from __future__ import annotations

from random import Random

from moetune.strategies.base import Terrain
from moetune.strategies.exhaustive import Exhaustive


class RandomOrder(Exhaustive):
    """All of the terrain's compiled configs, shuffled by the seed."""

    def __init__(self, terrain: Terrain, seed: int = 0) -> None:
        super().__init__(terrain)
        Random(seed).shuffle(self._waiting)
