"""The default search: all compiled configs first, then the neighbours of the best ones."""

from __future__ import annotations

from collections.abc import Sequence

from moetune.outcome import Measured, Outcome
from moetune.strategies.base import Terrain
from moetune_kernels.config import MoEKernelConfig

PARENTS = 3  # how many of the best have their neighbours tried; near ties often hide the better family
PER_PARENT = 6  # neighbours of one parent before the next parent gets its turn
ROUNDS = 2  # the polish is spent in at least so many rounds: the second one starts from what the first one found
FEWEST_OF_ROUND = 4


class Staged:
    """Coarse first, then a descent: neighbours of the best three until the polish is spent or nothing is new.

    The neighbourhood is taken again after every batch of answers, so that a new best has its own neighbours tried.
    """

    def __init__(self, terrain: Terrain, seed: int = 0) -> None:
        del seed  # deterministic: the seed only matters to searches that draw
        self._terrain = terrain
        self._waiting = list(terrain.coarse)
        self._seen = set(terrain.coarse)
        self._open: set[MoEKernelConfig] = set()
        self._times: dict[MoEKernelConfig, float] = {}
        self._polish_left = terrain.polish
        self._round = max(-(-terrain.polish // ROUNDS), FEWEST_OF_ROUND)

    def ask(self, count: int) -> Sequence[MoEKernelConfig]:
        """Return waiting coarse configs; once all of them ended, neighbours of the best."""
        if count <= 0:
            return []
        if not self._waiting and not self._open:
            self._waiting = self._next_neighbours()
        asked, self._waiting = self._waiting[:count], self._waiting[count:]
        self._open.update(asked)
        return asked

    def tell(self, config: MoEKernelConfig, outcome: Outcome) -> None:
        """Remember the time of a config that ran; a failure is never a parent."""
        self._open.discard(config)
        if isinstance(outcome, Measured):
            self._times[config] = outcome.median_us

    def _next_neighbours(self) -> list[MoEKernelConfig]:
        found: list[MoEKernelConfig] = []
        for parent in sorted(self._times, key=lambda config: self._times[config])[:PARENTS]:
            fresh = [config for config in self._terrain.neighbours(parent) if config not in self._seen]
            chosen = fresh[: min(PER_PARENT, self._polish_left, self._round - len(found))]
            self._polish_left -= len(chosen)
            self._seen.update(chosen)
            found += chosen
        return found
