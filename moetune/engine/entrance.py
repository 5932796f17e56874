"""Who enters a race: rounds of what its search asks for. While one race's kernels are timed, another's round is thought out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moetune.engine.budget import Deadline
from moetune.strategies.base import Strategy
from moetune_kernels.config import MoEKernelConfig

if TYPE_CHECKING:
    from moetune.engine.race import Race

BATCH = 24  # configs asked for at once, at most


@dataclass
class Entrance:
    """The entry of one race, round by round.

    Args:
        race: the race.
        strategy: its search.
        deadline: when its entry ends.
        is_left: whether a config is left for later.
    """

    race: Race
    strategy: Strategy
    deadline: Deadline
    is_left: Callable[[MoEKernelConfig], bool] = lambda _: False
    _asked: Sequence[MoEKernelConfig] | None = field(default=None, init=False)  # of a round that was not begun

    def think(self) -> None:
        """Let the search say what it tries next, and have it compiled; does nothing where that is known."""
        if self._asked is None:
            self._asked = self.strategy.ask(BATCH)
            self.race.request(self._asked, self.is_left)

    def play(self, meanwhile: Callable[[], object]) -> bool:
        """Time the next round; False when there was none, or the deadline cut it.

        Args:
            meanwhile: called again and again while kernels are timed.
        """
        self.think()
        asked, self._asked = self._asked, None
        waiting = dict.fromkeys(config for config in asked or () if not self.race.is_late(config))
        while waiting:
            ready = self.race.ready(waiting, self.deadline)
            with closing(self.race.times(ready, self.deadline)) as ends:
                for config, outcome in ends:
                    del waiting[config]
                    self.strategy.tell(config, outcome)
                    meanwhile()
            if not ready or any(config in waiting for config in ready):
                return False
        return bool(asked)


def by_turns(entrances: Iterable[Entrance]) -> None:
    """Play a round of each in turn until all are over. What a search asks for does not depend on the others."""
    left = list(entrances)

    def think_of_others(playing: Entrance) -> None:
        for other in left:
            if other is not playing:
                other.think()

    while left:
        for entrance in left.copy():
            if not entrance.play(lambda playing=entrance: think_of_others(playing)):
                left.remove(entrance)
