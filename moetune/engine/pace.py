"""How fast a sweep goes: what each token count may spend, from what all that are left are expected to need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetune.engine.bench import Bench
from moetune.engine.budget import Allowance, Budget
from moetune.engine.costs import Costs, Entrants
from moetune.engine.schedule import Quota, carried_over, quotas
from moetune.space import Space, sensible_block_ms
from moetune.space.load import ExpertLoad
from moetune_kernels.config import MoEKernelConfig, Role

COUNTERS_SHARE = 0.2  # of the budget: hardware counters that would take more are left out
COUNTERS_CAUTION = 1.15


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
    """

    budget: Budget
    costs: Costs
    bench: Bench
    spaces: Mapping[Role, Space]
    tokens: tuple[int, ...]
    polish: int

    def __post_init__(self) -> None:
        self._first_round = Counter(self.bench.compiles)
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

    def fits(self, tokens: int) -> bool:
        """Whether there is time for another look at a finished count, hardware counters afterwards included."""
        cost = self.costs.of_count(tokens, self._entrants(tokens, set(self.bench.loaded)))
        entries = len(self.tokens)
        counters_s = COUNTERS_CAUTION * self.costs.counters_s(entries) if self.counters_fit(entries) else 0.0
        return self.budget.lends(cost, counters_s)

    def allow(self, counts_left: Sequence[int]) -> Allowance:
        """Return what the first of ``counts_left``, which is open, may spend."""
        loaded = set(self.bench.loaded)
        costs = [self.costs.of_count(tokens, self._entrants(tokens, loaded)) for tokens in counts_left]
        return self.budget.allow(costs, self.counters_reserve_s)

    def learn(self, allowance: Allowance, seen_s: float, was_cut: bool) -> None:  # noqa: FBT001  # of the count, no mode
        """Take in what a count took once it was open; one that was cut only tells when it took more than foreseen."""
        cost = allowance.cost
        foreseen_s = cost.total_s + (cost.polish_s if allowance.polish else 0.0)
        if not was_cut or seen_s > foreseen_s:
            self.costs.learn(foreseen_s, seen_s)

    def quota(self, role: Role, tokens: int) -> Quota:
        """Return what a race of ``role`` may try at ``tokens``, and compile if time allows."""
        spent = self.bench.compiles[role] - self._first_round[role]
        return carried_over(self._quotas, tokens, spent)

    def _entrants(self, tokens: int, loaded: set[tuple[Role, MoEKernelConfig]]) -> dict[Role, Entrants]:
        """Count the kernels to time at ``tokens``, and add those to ``loaded`` that will be loaded there."""
        found: dict[Role, Entrants] = {}
        for role in Role:
            pool = [
                config
                for config in self.bench.inside(role)
                if config.block_m in self._sensible[tokens] and self.bench.known(role, tokens, config) is None
            ]
            quota = self.quota(role, tokens)
            count = min(quota.trials, len(pool))
            unloaded = [config for config in pool if (role, config) not in loaded][:count]
            loaded.update((role, config) for config in unloaded)
            found[role] = Entrants(count, len(unloaded), min(quota.kernels, quota.trials))
        return found
