"""The last heat of the finals: plans timed in the same rounds, in blocks, until it is clear which of them is best."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log1p

from moetune.engine.bench import time_of
from moetune.engine.budget import Deadline
from moetune.engine.decide import Finalist, ranking
from moetune.engine.paired import gap
from moetune.outcome import Failed, Figure, Measured, Outcome, over_all, summarize
from moetune_kernels.plan import LayerPlan

# Rounds are even: the order is reversed every other round, so that a drift of the clocks hits all plans alike.
FEWEST_ROUNDS = 8  # also past the deadline
FIRST_BLOCK = 16  # the fewest whose bounds an outlier does not widen; each block after it doubles the rounds
MOST_ROUNDS = 120
LAST_SECONDS = 3.0  # for the heat, flushes included, when the deadline allows it
FLUSH_US = 100.0  # writing and reading the flush buffers before each sample (H200)

TimePlans = Callable[[Sequence[LayerPlan], int], Mapping[LayerPlan, Outcome]]


@dataclass
class LastHeat:
    """Times finalists until the leader is told from the second and from the default, or their difference is noise.

    Args:
        time: times plans interleaved, so many rounds of each.
        default: the plan to beat.
        deadline: when the heat ends whatever is open.
        noise: the share of a time under which two plans are equal.
        preferred: winners of neighbouring token counts, which win ties.
    """

    time: TimePlans
    default: LayerPlan
    deadline: Deadline
    noise: float
    preferred: Collection[LayerPlan] = ()
    _spent_us: float = field(default=0.0, init=False)

    def run(self, entrants: Sequence[LayerPlan], first: Mapping[LayerPlan, Outcome]) -> dict[LayerPlan, Outcome]:
        """Return the outcome of every entrant over all its rounds; ``first`` are their times so far."""
        block = min(max(self._affordable(entrants, first), FEWEST_ROUNDS), FIRST_BLOCK)
        outcomes = self._time(entrants, block, first)
        while (contenders := self._contenders(outcomes)) and (rounds := self._more_rounds(contenders, outcomes)):
            for plan, outcome in self._time(contenders, rounds, outcomes).items():
                outcomes[plan] = _joined(outcomes[plan], outcome)
        return outcomes

    def _time(
        self, plans: Sequence[LayerPlan], rounds: int, known: Mapping[LayerPlan, Outcome]
    ) -> dict[LayerPlan, Outcome]:
        self._spent_us += rounds * _round_us(plans, known)
        return dict(self.time(plans, rounds)) if plans else {}

    def _affordable(self, plans: Sequence[LayerPlan], known: Mapping[LayerPlan, Outcome]) -> int:
        """Return the even number of rounds that time is left for."""
        left_us = min(1e6 * LAST_SECONDS - self._spent_us, 1e6 * max(self.deadline.left_s, 0.0))
        return 2 * int(max(left_us, 0.0) / _round_us(plans, known) / 2)

    def _contenders(self, outcomes: Mapping[LayerPlan, Outcome]) -> list[LayerPlan]:
        """Return the plans that have to be told apart, of those that had all rounds; whoever else is near ties at best.

        A plan that is surely slower than the leader beyond noise is not among them, but for the default.
        """
        timed = _timed(outcomes)
        most = max((len(measured.times_us) for measured in timed.values()), default=0)
        whole = {plan: measured for plan, measured in timed.items() if len(measured.times_us) == most}
        if not most:
            return []  # recorded without rounds: there is nothing to add to
        leader = min(whole.values(), key=lambda measured: measured.median_us)
        near = {
            plan: measured
            for plan, measured in whole.items()
            if plan == self.default or not _is_beaten(measured, leader, self.noise)
        }
        told_apart = {plan for pair in self._open_pairs(near) for plan in pair}
        return [plan for plan in near if plan in told_apart]

    def _more_rounds(self, contenders: Sequence[LayerPlan], outcomes: Mapping[LayerPlan, Outcome]) -> int:
        """Return how many rounds come next, an even number; 0 when nothing is open, or nothing can be added."""
        timed = {plan: measured for plan, measured in _timed(outcomes).items() if plan in contenders}
        done = len(next(iter(timed.values())).times_us)
        if all(self._is_settled(timed[one], timed[other]) for one, other in self._open_pairs(timed)):
            return 0
        return min(done, MOST_ROUNDS - done, self._affordable(contenders, outcomes))

    def _open_pairs(self, timed: Mapping[LayerPlan, Measured]) -> Iterator[tuple[LayerPlan, LayerPlan]]:
        """Yield what has to be told apart: the leader from the second, and leader and winner from the default."""
        ordered = sorted(timed, key=lambda plan: timed[plan].median_us)
        if len(ordered) > 1:
            yield ordered[0], ordered[1]
        default = timed.get(self.default)
        if default is None:
            return
        finalists = [Finalist(plan, measured) for plan, measured in timed.items()]
        winner = ranking(finalists, Finalist(self.default, default), self.preferred, self.noise)[0].plan
        yield from ((plan, self.default) for plan in (ordered[0], winner) if plan != self.default)

    def _is_settled(self, one: Measured, other: Measured) -> bool:
        found = gap(one.times_us, other.times_us)
        return found is not None and found.is_settled(self.noise)


def _timed(outcomes: Mapping[LayerPlan, Outcome]) -> dict[LayerPlan, Measured]:
    return {plan: outcome for plan, outcome in outcomes.items() if isinstance(outcome, Measured)}


def _is_beaten(measured: Measured, leader: Measured, noise: float) -> bool:
    found = gap(measured.times_us, leader.times_us)
    return found is not None and found.low > log1p(noise)


def _round_us(plans: Sequence[LayerPlan], known: Mapping[LayerPlan, Outcome]) -> float:
    times = [time_of(known[plan]) + FLUSH_US for plan in plans if isinstance(known[plan], Measured)]
    return sum(times) or FLUSH_US


def _joined(one: Outcome, more: Outcome) -> Outcome:
    """Return the outcome over both blocks of rounds; a plan that failed in one has failed."""
    if isinstance(one, Failed) or isinstance(more, Failed):
        return one if isinstance(one, Failed) else more
    times_us = one.times_us + more.times_us
    sample = summarize(times_us)
    faster = more.median_us / sample.median_us
    return replace(
        more,
        median_us=sample.median_us,
        spread_us=sample.spread_us,
        samples=sample.count,
        times_us=times_us,
        clocks=over_all([one.clocks, more.clocks]),
        bandwidth_gbps=_times(more.bandwidth_gbps, faster),
        issue_efficiency=_times(more.issue_efficiency, faster),
    )


def _times(figure: Figure, factor: float) -> Figure:
    """Return a rate over the time that all rounds give, where its own block's time was another."""
    return figure if figure.value is None else replace(figure, value=figure.value * factor)
