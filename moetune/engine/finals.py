"""The finals of one token count: whole layers, interleaved, against the default plan; the winner is verified."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moetune.engine.bench import Bench, time_of
from moetune.engine.budget import Deadline
from moetune.engine.decide import NOISE, Finalist, ranking
from moetune.engine.last_heat import FEWEST_ROUNDS, LastHeat
from moetune.outcome import Failed, FailureKind, Measured, Outcome, Stage, Subject, Trial
from moetune_kernels.plan import LayerPlan

FIRST_ROUNDS = 6  # even, as in the last heat, and fewer than there
LAST_PLANS = 4  # beside the default
REROUTED_ROUNDS = 20  # per routing, of a winner beside the default
REROUTED_FLOOR = 0.005  # a winner this far behind the default under another routing is none; these rounds tell no less

Outcomes = Mapping[LayerPlan, Outcome]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The winner of a token count and the default's time beside it; None where the default is wrong or cannot run."""

    winner: Finalist
    baseline_us: float | None


@dataclass
class Finals:
    """Both heats of the finals at the open token count.

    Args:
        bench: where trials happen.
        tokens: the open token count.
        default: the plan that every other has to beat.
        deadline: when the last heat is cut to its minimum.
        noise: the share of a time under which two plans are equal.
        may_win: whether a plan is inside the user's limits; only the default comes here when it is not, as the baseline.
    """

    bench: Bench
    tokens: int
    default: LayerPlan
    deadline: Deadline
    noise: float = NOISE
    may_win: Callable[[LayerPlan], bool] = lambda _: True
    _verdicts: dict[LayerPlan, Failed | None] = field(default_factory=dict[LayerPlan, "Failed | None"])
    _lucky: dict[LayerPlan, Failed] = field(default_factory=dict[LayerPlan, Failed])

    def run(self, plans: Sequence[LayerPlan], preferred: Collection[LayerPlan] = ()) -> Verdict | Failed:
        """Time the plans and the default, and return the best one that is right; Failed when none is.

        Args:
            plans: whole-layer candidates beside the default.
            preferred: winners of neighbouring token counts, which win ties.
        """
        entrants = list(dict.fromkeys([*plans, self.default]))
        first = self._first_heat(entrants)
        last = self._last_heat(self._last_entrants(entrants, first), first, preferred)
        outcomes = {**first, **last}
        right = self._right(self._order(outcomes, last, preferred))
        winner = next((one for one in right if self.may_win(one.plan) and self._holds(one.plan)), None)
        for plan in entrants:
            if isinstance(first[plan], Measured):
                self._end(plan, outcomes[plan])
        if winner is None:
            return self._why_none(outcomes)
        baseline = outcomes[self.default] if self._is_right(self.default) else None
        return Verdict(winner, baseline.median_us if isinstance(baseline, Measured) else None)

    def _first_heat(self, entrants: Sequence[LayerPlan]) -> dict[LayerPlan, Outcome]:
        """Time all but those that took the device down in an earlier run; failures are written down at once."""
        known = {plan: self.bench.screened.get((Subject.LAYER, self.tokens, plan)) for plan in entrants}
        crashed: dict[LayerPlan, Outcome] = {plan: trial.outcome for plan, trial in known.items() if trial is not None}
        timed = self._time([plan for plan in entrants if plan not in crashed], FIRST_ROUNDS)
        for plan, outcome in timed.items():
            if isinstance(outcome, Failed):
                self._end(plan, outcome)
        return {plan: crashed[plan] if plan in crashed else timed[plan] for plan in entrants}

    def _time(self, plans: Sequence[LayerPlan], rounds: int) -> dict[LayerPlan, Outcome]:
        """Time whole layers; one whose last replay was wrong is wrong, whatever else it passed."""
        timed = dict(zip(plans, self.bench.backend.time_layers(plans, rounds), strict=True)) if plans else {}
        for plan, outcome in timed.items():
            if isinstance(outcome, Failed) and outcome.kind is FailureKind.WRONG:
                self._verdicts[plan] = outcome
        return timed

    def _last_heat(
        self, entrants: Sequence[LayerPlan], first: Outcomes, preferred: Collection[LayerPlan]
    ) -> dict[LayerPlan, Outcome]:
        if self.bench.backend.recorded_plans(self.tokens):
            return self._time(entrants, FEWEST_ROUNDS)  # all rounds that there are: asking again would count them twice
        return LastHeat(self._time, self.default, self.deadline, self.noise, preferred).run(entrants, first)

    def _last_entrants(self, entrants: Sequence[LayerPlan], first: Outcomes) -> list[LayerPlan]:
        ran = [plan for plan in entrants if isinstance(first[plan], Measured)]
        rivals = [plan for plan in ran if plan != self.default]
        # None in a live sweep; in a replay those that reached the last heat then are timed more often than the others.
        reached = [plan for plan in rivals if _samples(first[plan]) > FIRST_ROUNDS]
        ranked = sorted(reached or rivals, key=lambda plan: time_of(first[plan]))
        right = itertools.islice(filter(self._verify, ranked), LAST_PLANS)  # a wrong one makes room for the next
        return [*right, *(plan for plan in ran if plan == self.default and self._verify(plan))]

    def _order(self, outcomes: Outcomes, last: Outcomes, preferred: Collection[LayerPlan]) -> list[Finalist]:
        """Return everything that ran in the order of merit; those that missed the last heat come after it."""
        found: list[Finalist] = []
        for plans in ([plan for plan in outcomes if plan in last], [plan for plan in outcomes if plan not in last]):
            timed = [Finalist(plan, outcome) for plan in plans if isinstance(outcome := outcomes[plan], Measured)]
            default = next((one for one in timed if one.plan == self.default and self.may_win(one.plan)), None)
            found += ranking(timed, default, preferred, self.noise)
        return found

    def _right(self, order: Sequence[Finalist]) -> Iterator[Finalist]:
        return (finalist for finalist in order if self._verify(finalist.plan))

    def _holds(self, plan: LayerPlan) -> bool:
        """Whether the plan is no slower than the default under other routings too, where it beat it under one."""
        if plan == self.default or not self._is_right(self.default) or not self.may_win(self.default):
            return True
        for beside in self.bench.backend.time_rerouted([plan, self.default], REROUTED_ROUNDS):
            failed = _behind(beside[0], beside[1], max(self.noise, REROUTED_FLOOR))
            if failed is not None:
                self._lucky[plan] = failed
                return False
        return True

    def _verify(self, plan: LayerPlan) -> bool:
        if plan not in self._verdicts:
            self._verdicts[plan] = self.bench.backend.verify_layer(plan)
        return self._is_right(plan)

    def _is_right(self, plan: LayerPlan) -> bool:
        return plan in self._verdicts and self._verdicts[plan] is None

    def _why_none(self, outcomes: Outcomes) -> Failed:
        failures = [*(wrong for wrong in self._verdicts.values() if wrong is not None), *self._lucky.values()]
        failures += [outcome for outcome in outcomes.values() if isinstance(outcome, Failed)]
        return failures[0] if failures else Failed(FailureKind.LAUNCH, "no plan ran")

    def _end(self, plan: LayerPlan, outcome: Outcome) -> None:
        self.bench.end(
            Trial(
                subject=Subject.LAYER,
                tokens=self.tokens,
                choice=plan,
                stage=Stage.FINAL,
                outcome=self._verdicts.get(plan) or self._lucky.get(plan) or outcome,
                verified=self._is_right(plan),
            )
        )


def _behind(plan: Outcome, default: Outcome, floor: float) -> Failed | None:
    """Return why the plan lost against the default under another routing, None when it did not or the default failed."""
    if isinstance(plan, Failed):
        return plan
    if isinstance(default, Failed) or plan.median_us <= (1 + floor) * default.median_us:
        return None
    times = f"{plan.median_us:.1f} us against {default.median_us:.1f} us"
    return Failed(FailureKind.SLOW, f"slower than the default plan when other experts are touched: {times}")


def _samples(outcome: Outcome) -> int:
    return outcome.samples if isinstance(outcome, Measured) else 0
