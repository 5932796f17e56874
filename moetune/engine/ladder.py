"""Between the entries of a table: whose plan serves there, and what that loses against every plan known nearby.

A token count that was not tuned is served by a neighbour's plan. How good that is shows only by timing it: here the
plans of all entries nearby, and the default plan, are timed at the geometric mean of each two neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

from moetune.engine.bench import Bench, time_of
from moetune.outcome import Failed, Measured
from moetune_kernels.plan import LayerPlan
from moetune_kernels.table import Entry

ROUNDS = 10  # per plan and probe: even, so that the order is reversed as often as not
REACH = 8.0  # entries further away than this many times the token count have plans for another bottleneck
WORTH_AN_ENTRY = 0.02  # a neighbour's plan that loses more than this share of the best one's time


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was measured between two neighbouring entries.

    Args:
        tokens: the token count between them.
        lower, upper: token counts of the entries.
        times_us: plans that ran there and their times in microseconds.
        lower_plan, upper_plan: the entries' plans.
    """

    tokens: int
    lower: int
    upper: int
    times_us: Mapping[LayerPlan, float]
    lower_plan: LayerPlan
    upper_plan: LayerPlan

    @property
    def upper_serves(self) -> bool:
        """Whether the upper entry's plan is the faster one here; the lower one's is at a tie."""
        infinite = float("inf")
        return self.times_us.get(self.upper_plan, infinite) < self.times_us.get(self.lower_plan, infinite)

    @property
    def serving(self) -> int:
        """The token count of the entry whose plan serves here."""
        return self.upper if self.upper_serves else self.lower

    @property
    def loss(self) -> float | None:
        """The share of the best plan's time that the serving plan takes longer; None where neither entry's plan runs."""
        served = self.times_us.get(self.upper_plan if self.upper_serves else self.lower_plan)
        return None if served is None else served / min(self.times_us.values()) - 1.0

    @property
    def best(self) -> LayerPlan | None:
        """The fastest plan that ran here."""
        return min(self.times_us, key=lambda plan: self.times_us[plan], default=None)

    @property
    def last_of_lower(self) -> int:
        """The last token count that the lower entry serves: half the gap, by ratio, goes with the plan that won."""
        return isqrt(self.lower * self.tokens) if self.upper_serves else isqrt(self.tokens * self.upper)


def gaps(tokens: Mapping[int, object]) -> list[tuple[int, int, int]]:
    """Return ``(lower, between, upper)`` of neighbouring token counts that leave one out, the widest gap first.

    >>> gaps({1: 0, 2: 0, 4: 0, 16: 0})
    [(4, 8, 16), (2, 3, 4)]
    """
    found = [(low, max(isqrt(low * high), low + 1), high) for low, high in pairwise(sorted(tokens)) if high > low + 1]
    return sorted(found, key=lambda gap: gap[0] / gap[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Probes between the entries of one sweep.

    Args:
        bench: where layers are timed.
        default_plan: the default plan at a token count.
    """

    bench: Bench
    default_plan: Callable[[int], LayerPlan]

    def plans(self, tokens: int, entries: Mapping[int, Entry]) -> list[LayerPlan]:
        """Return every plan known near a token count, the default one included."""
        near = [entry for count, entry in entries.items() if max(count, tokens) <= REACH * min(count, tokens)]
        return list(dict.fromkeys([*(entry.plan for entry in near), self.default_plan(tokens)]))

    def probe(self, gap: tuple[int, int, int], entries: Mapping[int, Entry]) -> Probe | Failed:
        """Open the token count between two entries and time every plan known nearby there; Failed when it cannot open."""
        lower, tokens, upper = gap
        failed = self.bench.backend.open(tokens)
        if failed is not None:
            return failed
        plans = self.plans(tokens, entries)
        outcomes = self.bench.backend.time_layers(plans, ROUNDS)
        times = {
            plan: time_of(outcome)
            for plan, outcome in zip(plans, outcomes, strict=True)
            if isinstance(outcome, Measured)
        }
        return Probe(
            tokens=tokens,
            lower=lower,
            upper=upper,
            times_us=times,
            lower_plan=entries[lower].plan,
            upper_plan=entries[upper].plan,
        )
