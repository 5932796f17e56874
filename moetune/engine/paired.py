"""Whether two plans that were timed in the same rounds differ: by the ratio of their times, round by round.

What disturbs a round (clocks, power, a neighbour) disturbs both plans in it, so the ratio is steadier than either time.
Its median is bounded by order statistics, which hold whatever the distribution is: outliers widen nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, exp, log, log1p
from statistics import median

# Per look. Of 18 token counts, three pairs and five looks each, less than one is told apart that is equal, and then its
# difference has to be over the noise as well.
CONFIDENCE = 0.9973  # three standard errors of a normal mean


@dataclass(frozen=True, slots=True)
class Gap:
    """How much slower one plan is than another, as logarithms of the ratio: its median, and bounds that hold it."""

    median: float
    low: float
    high: float

    @property
    def percent(self) -> float:
        """The median in percent of the other plan's time; negative when the one is faster."""
        return 100 * (exp(self.median) - 1)

    @property
    def is_separated(self) -> bool:
        """Whether one of the two is surely the faster."""
        return self.low > 0 or self.high < 0

    def is_under(self, noise: float) -> bool:
        """Whether the difference is surely smaller than ``noise``, a share of the time."""
        return -log1p(noise) < self.low and self.high < log1p(noise)

    def is_settled(self, noise: float) -> bool:
        """Whether more rounds would change nothing: surely different, or surely equal for all that matters."""
        return self.is_separated or self.is_under(noise)


def gap(one_us: Sequence[float], other_us: Sequence[float]) -> Gap | None:
    """Return how much slower ``one_us`` is than ``other_us``, times in the order of their rounds.

    Where one was timed in more rounds, the first ones count, which both have.

    Returns:
        None when there are too few rounds for any bound.

    >>> found = gap([102.0] * 16, [100.0] * 16)
    >>> found is not None and found.is_separated, gap([102.0] * 4, [100.0] * 4)
    (True, None)
    """
    ratios = sorted(log(one / other) for one, other in zip(one_us, other_us, strict=False))
    place = _bound_place(len(ratios))
    return None if place is None else Gap(median(ratios), ratios[place], ratios[-1 - place])


@cache
def _bound_place(count: int) -> int | None:
    """Return the largest place from either end of ``count`` sorted values between which the median surely lies.

    The number of values under the median is binomial with one half, so the chance that the median lies outside is twice
    the chance of so few.
    """
    allowed = (1 - CONFIDENCE) / 2 * 2**count
    below = 0
    place = None
    for candidate in range(count // 2):
        below += comb(count, candidate)
        if below > allowed:
            break
        place = candidate
    return place
