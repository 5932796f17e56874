"""How fast a sweep goes: what each token count may spend, from what all that are left are expected to need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from moetune.engine.backend import Kernel
from moetune.engine.bench import Bench
from moetune.engine.budget import CAUTION, Allowance, Budget, CountCost, Deadline, wall_s
from moetune.engine.costs import Costs, Entrants
from moetune.engine.schedule import TRIALS, Quota, carried_over, quotas
from moetune.space import Space, sensible_block_ms
from moetune.space.load import ExpertLoad
from moetune_kernels.config import MoEKernelConfig, Role

COUNTERS_SHARE = 0.2  # of the budget: hardware counters that would take more are left out
COUNTERS_CAUTION = 1.15
SURVEY_SHARE = 0.5  # of what is left: when a survey that takes far longer than foreseen ends
AtHand = Mapping[Role, Sequence[MoEKernelConfig]]
FEWEST_TRIALS = 6  # of a race after a survey: what won at other counts since


@dataclass
class Pace:
    """The plan of the token counts that are left, made anew as each one is opened.

    Args:
        budget: wall time, running.
        costs: the cost model.
        bench: what is compiled, loaded and known.
        spaces: the candidates of each role.
        tokens: the whole ladder.
        polish: kernels that searches may have compiled, both roles and all counts together.
        workers: how many tune beside each other now; what is left is theirs together.
        asked: configs that searches asked for, of each role at each token count.
    """

    budget: Budget
    costs: Costs
    bench: Bench
    spaces: Mapping[Role, Space]
    tokens: tuple[int, ...]
    polish: int
    workers: Callable[[], int] = lambda: 1
    asked: Counter[tuple[Role, int]] = field(default_factory=Counter[tuple[Role, int]])

    def __post_init__(self) -> None:
        self._first_round = self._requested()
        self._held: dict[tuple[Role, int], int] = {}  # kernels of searches that still go on
        shape = self.costs.shape
        rows = {tokens: ExpertLoad.of(shape, tokens).rows for tokens in self.tokens}
        self._quotas = quotas(rows, self.polish // len(Role))
        self._sensible = {tokens: set(sensible_block_ms(shape, tokens)) for tokens in self.tokens}

    @property
    def counters_reserve_s(self) -> float:
        """Seconds kept for hardware counters; none where they would eat up the budget."""
        needed_s = COUNTERS_CAUTION * self.costs.counters_s(len(self.tokens))
        return needed_s if needed_s <= COUNTERS_SHARE * self.budget.total_s else 0.0

    def counters_fit(self, entries: int) -> bool:
        """Whether hardware counters can be read in what is left."""
        return self.budget.remaining_s >= self.costs.counters_s(entries)

    def probe_fits(self, tokens: int, plans: int) -> bool:
        """Whether so many plans can be timed at ``tokens``, and what comes after that still has its time."""
        needed_s = CAUTION * self.costs.probe_s(tokens, plans)
        return self.budget.working_s - self.counters_reserve_s >= needed_s

    def count_fits(self, tokens: int, *, has_neighbours: bool) -> bool:
        """Whether there is time for the least that ``tokens`` take: the default plan beside what is known, or a short race."""
        cost = self._cost(tokens, set(self.bench.loaded), self._at_hand())
        race_s = 0.0 if has_neighbours else cost.ending_s
        return self.budget.working_s >= cost.opening_s + race_s + cost.least_s

    def admit(self, tokens: int) -> None:
        """Take a token count in that was not on the ladder."""
        self._quotas[tokens] = Quota(trials=TRIALS, kernels=0)
        self._sensible[tokens] = set(sensible_block_ms(self.costs.shape, tokens))

    def allow(self, counts_left: Sequence[int], loaded: Collection[Kernel]) -> Allowance:
        """Return what the first of ``counts_left`` may spend, which is open on a GPU that launched ``loaded`` before.

        The others are those that no worker has in hand: all workers share them.
        """
        loading, at_hand = set(loaded), self._at_hand()
        costs = [self._cost(tokens, loading, at_hand) for tokens in counts_left]
        return self.budget.allow(costs, self.counters_reserve_s, self.workers())

    def learn(self, allowance: Allowance, seen_s: float, was_cut: bool) -> None:  # noqa: FBT001  # of the count, no mode
        """Take in what a count took once it was open; one that was cut only tells when it took more than foreseen."""
        cost = allowance.cost
        if not was_cut or seen_s > cost.total_s:
            self.costs.learn(cost.total_s, seen_s)

    def quota(self, role: Role, tokens: int) -> Quota:
        """Return what a survey of ``role`` at ``tokens`` may try, and ask the compiler for."""
        held = sum(kernels for (one, _), kernels in self._held.items() if one is role)
        spent = self._requested()[role] - self._first_round[role] + held
        return carried_over(self._quotas, tokens, spent)

    @contextmanager
    def held(self, role: Role, tokens: int) -> Generator[Quota]:
        """Yield the quota of a survey; while it goes on, other workers' surveys do not count on what it leaves."""
        quota = self.quota(role, tokens)
        self._held[role, tokens] = quota.kernels
        try:
            yield quota
        finally:
            del self._held[role, tokens]

    def rest(self, role: Role, tokens: int) -> Quota:
        """Return what a race of ``role`` at ``tokens`` may try of what is compiled, besides what was tried there."""
        left = self._quotas[tokens].trials - self.asked[role, tokens]
        return Quota(trials=max(left, FEWEST_TRIALS), kernels=0)

    def wishes(self, role: Role, tokens: int) -> Quota:
        """Return what a race may try that waits for no compiler: the kernels that no survey asked for are asked for there."""
        trials = self.rest(role, tokens).trials
        return Quota(trials=trials, kernels=min(self.quota(role, tokens).kernels, trials))

    def survey_deadline(self, counts: Sequence[int]) -> Deadline | None:
        """Return when a survey of ``counts`` ends, None where there is no time for one.

        It takes trials from the races that follow; what it adds is opening the counts once more. Where there is too little
        time for all races it still tells what to compile, from half of what the least of every count leaves.
        """
        loaded, at_hand = set(self.bench.loaded), self._at_hand()
        costs = {tokens: self._cost(tokens, loaded, at_hand) for tokens in self.tokens}
        later_s = wall_s([cost.opening_s + cost.total_s for cost in costs.values()], self.workers())
        extra_s = wall_s([costs[tokens].opening_s for tokens in counts], self.workers())
        left_s = self.budget.working_s - self.counters_reserve_s
        if left_s < CAUTION * (later_s + extra_s):
            left_s -= CAUTION * wall_s([cost.opening_s + cost.least_s for cost in costs.values()], self.workers())
        if not counts or left_s <= 0:
            return None
        return Deadline(self.budget.clock() + left_s, self.budget.clock).after(SURVEY_SHARE)

    def _requested(self) -> Counter[Role]:
        return Counter(role for role, _ in self.bench.requested)

    def _at_hand(self) -> AtHand:
        return {role: self.bench.at_hand(role) for role in Role}

    def _cost(self, tokens: int, loaded: set[Kernel], at_hand: AtHand) -> CountCost:
        return self.costs.of_count(tokens, self._entrants(tokens, loaded, at_hand))

    def _entrants(self, tokens: int, loaded: set[Kernel], at_hand: AtHand) -> dict[Role, Entrants]:
        """Count the kernels to time at ``tokens``, and add those to ``loaded`` that will be loaded there."""
        found: dict[Role, Entrants] = {}
        for role in Role:
            pool = [
                config
                for config in at_hand[role]
                if config.block_m in self._sensible[tokens] and self.bench.known(role, tokens, config) is None
            ]
            count = min(self.rest(role, tokens).trials, len(pool))
            unloaded = [config for config in pool if (role, config) not in loaded][:count]
            kinds = {config.structure for one, config in loaded if one is role}
            loaded.update((role, config) for config in unloaded)
            found[role] = Entrants(count, len(unloaded), len({config.structure for config in unloaded} - kinds))
        return found
