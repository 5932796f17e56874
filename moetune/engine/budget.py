"""How much wall time is left, and how it is shared out among the token counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

Clock = Callable[[], float]

COMPILE_SHARE = 0.4  # of what is left when compiling starts: what its first round may take before it is cut
RESERVE_SHARE = 0.15  # of the budget, for the counters of the winners and the last write
RESERVE_LIMIT_S = 40.0


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


class Budget:
    """Wall seconds of one sweep, from the moment it is made; None means no limit.

    >>> Budget(None).remaining_s
    inf
    """

    def __init__(self, total_s: float | None, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        self.total_s = inf if total_s is None else total_s

    @property
    def remaining_s(self) -> float:
        """Seconds left; negative when the budget is overdrawn."""
        return self._started_s + self.total_s - self._clock()

    @property
    def reserve_s(self) -> float:
        """Seconds kept for what comes after the last token count."""
        return min(RESERVE_SHARE * self.total_s, RESERVE_LIMIT_S)

    def compile_deadline(self) -> Deadline:
        """Return the moment when a first round of compiles that starts now is cut."""
        return Deadline(self._clock() + COMPILE_SHARE * self.remaining_s, self._clock)

    def share(self, costs: Sequence[float]) -> Deadline:
        """Return the deadline of the first of the token counts that are left, whose relative costs are ``costs``.

        What one count does not spend, the later ones have.
        """
        usable_s = max(self.remaining_s - self.reserve_s, 0.0)
        if usable_s == inf:
            return Deadline(inf, self._clock)
        return Deadline(self._clock() + usable_s * costs[0] / sum(costs), self._clock)
