"""How much wall time is left, and how it is shared out among the token counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import inf

Clock = Callable[[], float]

COMPILE_SHARE = 0.4  # of what is left when compiling starts: what its first round may take before it is cut
# Kept for the end: the processes' (0.4 s on an H200), the last write's, the recording's, and for what no estimate foresaw.
CLOSING_S, CLOSING_SHARE, CLOSING_MOST_S = 0.7, 0.015, 4.0
CAUTION = 1.1  # times what the later counts are expected to need: what is left of that may be lent at will
ESTIMATES_ERR = 1.6  # times its own estimate, as long as the later counts keep theirs


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on a clock, in seconds."""

    at_s: float
    clock: Clock

    @property
    def passed(self) -> bool:
        """Whether the moment is over."""
        return self.clock() >= self.at_s

    @property
    def left_s(self) -> float:
        """Seconds until the moment, negative when it is over."""
        return self.at_s - self.clock()

    def after(self, share: float) -> Deadline:
        """Return the moment when ``share`` of what is left is spent."""
        return Deadline(self.clock() + share * self.left_s if self.at_s < inf else inf, self.clock)

    def before(self, seconds: float) -> Deadline:
        """Return the moment ``seconds`` earlier."""
        return Deadline(self.at_s - seconds, self.clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountCost:
    """Seconds of one token count.

    Args:
        opening_s: rows and references.
        gate_up_s, down_s: a whole race of each.
        ending_s, down_ending_s: the fewest that race whatever the time, both roles and down alone.
        finals_s: routing, layers and their verification.
        least_s: what is left without races: the finals of a few plans.
        shortest_s: the fewest entrants of both roles, and finals with the fewest rounds of all that these give.
    """

    opening_s: float
    gate_up_s: float
    down_s: float
    ending_s: float
    down_ending_s: float
    finals_s: float
    least_s: float
    shortest_s: float

    @property
    def total_s(self) -> float:
        """All of it once the count is open."""
        return self.gate_up_s + self.down_s + self.finals_s

    def times(self, factor: float) -> CountCost:
        """Return the cost where everything takes ``factor`` times as long."""
        return CountCost(**{item.name: factor * getattr(self, item.name) for item in fields(self)})


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one token count may spend.

    Args:
        cost: what it is expected to need.
        deadline: its end.
        share: of the cost, what it may spend; 1 and not more where there is enough.
        races: whether there is time for races at all; without it only known plans are compared.
    """

    cost: CountCost
    deadline: Deadline
    share: float
    races: bool

    @property
    def is_scarce(self) -> bool:
        """Whether it may not spend all that it is expected to need."""
        return self.share < 1.0

    @property
    def gate_up_deadline(self) -> Deadline:
        """The end of gate-up's race: what follows it, down's race included, has its own time."""
        part = self.cost.gate_up_s / max(self.cost.gate_up_s + self.cost.down_s, 1e-9)
        return self.deadline.before(self._finals_s + (1.0 - self.share) * self.cost.ending_s).after(part)

    @property
    def down_deadline(self) -> Deadline:
        """The end of down's race."""
        return self.deadline.before(self._finals_s + (1.0 - self.share) * self.cost.down_ending_s)

    @property
    def _finals_s(self) -> float:
        """What is kept for the finals, whose last heat takes as many rounds as there is time for."""
        return max(self.share * self.cost.finals_s, self.cost.least_s) if self.is_scarce else self.cost.finals_s


def wall_s(parts_s: Sequence[float], workers: int) -> float:
    """Return the seconds until ``workers`` have done all parts: none is split, so the longest one is the least.

    >>> wall_s([4.0, 2.0, 2.0], 1), wall_s([4.0, 2.0, 2.0], 2), wall_s([4.0, 2.0, 2.0], 8)
    (8.0, 4.0, 4.0)
    """
    return max(sum(parts_s) / workers, max(parts_s, default=0.0))


class Budget:
    """Wall seconds of one sweep, from the moment it is made; None means no limit.

    >>> Budget(None).remaining_s
    inf
    """

    def __init__(self, total_s: float | None, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._started_s = clock()
        self.total_s = inf if total_s is None else total_s

    @property
    def remaining_s(self) -> float:
        """Seconds left; negative when the budget is overdrawn."""
        return self._started_s + self.total_s - self.clock()

    @property
    def working_s(self) -> float:
        """Seconds left for work: what the end takes is kept."""
        return self.remaining_s - min(CLOSING_S + CLOSING_SHARE * self.total_s, CLOSING_MOST_S)

    def compile_deadline(self) -> Deadline:
        """Return the moment when a first round of compiles that starts now is cut."""
        return Deadline(self.clock() + COMPILE_SHARE * self.remaining_s, self.clock)

    def allow(self, costs: Sequence[CountCost], reserve_s: float, workers: int = 1) -> Allowance:
        """Return what the first of the token counts that are left may spend; it is open already.

        It may have all that the later ones will not need. Where that is too little, each gets its least (its default
        plan compared with the neighbours' winners) and a like part of the rest.

        Args:
            costs: what each count that is left is expected to need.
            reserve_s: seconds kept for what comes after the last count.
            workers: who tune the later counts beside each other.
        """
        first, later = costs[0], costs[1:]
        now_s = self.clock()
        left_s = self.working_s - reserve_s
        if left_s == inf:
            return Allowance(first, Deadline(inf, self.clock), share=1.0, races=True)
        later_s = wall_s([cost.opening_s + cost.total_s for cost in later], workers)
        if left_s - later_s >= first.total_s:
            spare_s = left_s - CAUTION * later_s
            lent_s = max(spare_s, min(ESTIMATES_ERR * first.total_s, left_s - later_s))
            return Allowance(first, Deadline(now_s + lent_s, self.clock), share=1.0, races=True)
        least_s = first.least_s + wall_s([cost.opening_s + cost.least_s for cost in later], workers)
        wanted_s = first.total_s - first.least_s + wall_s([cost.total_s - cost.least_s for cost in later], workers)
        extra_s = (left_s - least_s) * (first.total_s - first.least_s) / wanted_s if wanted_s > 0 else 0.0
        deadline = Deadline(now_s + first.least_s + extra_s, self.clock)
        share = min(max((first.least_s + extra_s) / first.total_s, 0.0), 1.0)
        return Allowance(first, deadline, share=share, races=extra_s >= first.shortest_s - first.least_s)
