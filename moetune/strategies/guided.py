"""The default search: a prior guides it, a model of the prior's errors corrects it, the best ones' neighbours polish it.

It reads the trials of the whole sweep. At the first token counts it starts from the prior alone; later ones start from
what won at the counts around them. A model picks well where times are smooth and misses lone needles; local search
finds needles next to good configs and stays in valleys. So both pick from the same log, and neither has to be right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, log
from random import Random

from moetune.outcome import Measured, Outcome
from moetune.strategies.base import Terrain
from moetune.strategies.view import Elsewhere, View
from moetune_kernels.config import MoEKernelConfig

OPENING, ROUND = 8, 5  # trials of the first round, and of a later one
LOCAL_SHARE = 0.3  # of a later round: neighbours of the best; the model picks the rest
STRAY = 12  # every so many trials one is drawn at random, so that no family is left out by a wrong model
ELITES = 3  # configs whose neighbours are tried, and that a near token count passes on
NEAR_COUNTS = 2  # token counts on either side that pass theirs on
HEIGHT_RATIO = 1.15  # a tile height expected this near the best gets a trial: the other GEMM may need that height
POOL = 700  # legal configs with the best guesses that are looked at


@dataclass
class Draft:
    """A round while it is put together: it takes each config once, and only as many fresh kernels as it may.

    Args:
        size: how many configs it may hold.
        kernels: how many of these may need a compile.
        taken: configs that were tried before.
        compiled: configs that need no compile.
    """

    size: int
    kernels: int
    taken: set[MoEKernelConfig]
    compiled: set[MoEKernelConfig]
    configs: list[MoEKernelConfig] = field(default_factory=list[MoEKernelConfig])

    @property
    def room(self) -> int:
        """How many configs it can still take."""
        return self.size - len(self.configs)

    @property
    def fresh(self) -> int:
        """How many of its configs need a compile."""
        return sum(config not in self.compiled for config in self.configs)

    def take(self, configs: Iterable[MoEKernelConfig], most: int | None = None) -> None:
        """Add configs in their order, at most ``most`` of them."""
        room = self.room if most is None else min(most, self.room)
        for config in configs:
            if room <= 0:
                return
            if config in self.taken or config in self.configs:
                continue
            if config in self.compiled or self.fresh < self.kernels:
                self.configs.append(config)
                room -= 1


class Guided:
    """Rounds of model picks and of neighbours until the trials are spent or nothing promises a gain."""

    def __init__(self, terrain: Terrain, seed: int = 0) -> None:
        self._terrain = terrain
        self._random = Random(f"{seed} {terrain.problem.role.value} {terrain.tokens}")
        self._compiled = set(terrain.compiled)
        self._times = dict(terrain.log.times_us(terrain.problem.role, terrain.tokens))
        self._asked: set[MoEKernelConfig] = set()
        self._open: set[MoEKernelConfig] = set()
        self._waiting: list[MoEKernelConfig] = []
        self._kernels_left = terrain.kernels
        self._elsewhere = Elsewhere(terrain)
        self._pool = list(dict.fromkeys((*terrain.compiled, *self._best_reserve())))

    def ask(self, count: int) -> Sequence[MoEKernelConfig]:
        """Return the next configs of a round; the next round starts when all answers of this one are in."""
        if count <= 0:
            return []
        if not self._waiting and not self._open:
            self._waiting = self._next_round()
        asked, self._waiting = self._waiting[:count], self._waiting[count:]
        self._open.update(asked)
        return asked

    def tell(self, config: MoEKernelConfig, outcome: Outcome) -> None:
        """Take the time of a config; a failure is a bad config, never a parent."""
        self._open.discard(config)
        self._times[config] = outcome.median_us if isinstance(outcome, Measured) else inf

    def _best_reserve(self) -> list[MoEKernelConfig]:
        if not self._terrain.kernels:
            return []
        return sorted(self._terrain.reserve, key=lambda config: self._terrain.guess(config, self._terrain.tokens))[
            :POOL
        ]

    # one round

    def _next_round(self) -> list[MoEKernelConfig]:
        left = self._terrain.trials - len(self._asked)
        if left <= 0:
            return []
        draft = self._later(left) if self._asked else self._opening(left)
        self._asked.update(draft.configs)
        self._kernels_left -= draft.fresh
        return draft.configs

    def _opening(self, left: int) -> Draft:
        """Return what won elsewhere, the best expected of each tile height, and what the model hopes for most."""
        view, draft = self._view(), self._draft(min(OPENING, left), kernels=0)
        draft.take(self._passed_on(), most=draft.size // 2)
        draft.take(self._terrain.seeds)
        compiled = self._unseen(self._terrain.compiled)
        draft.take(view.best_of_each_height(compiled, HEIGHT_RATIO))
        draft.take(view.promising(compiled, draft.room))
        if not self._times:  # whatever the guess says of them: after one or two trials nobody knows how far it is off
            draft.take(view.by_expectation(compiled))
        return draft

    def _later(self, left: int) -> Draft:
        """Return neighbours of the best, model picks, and now and then a stray.

        What may be compiled goes into one round: compile processes are only busy with many kernels at once, and one
        round in two lost nothing in rehearsals.
        """
        kernels = self._kernels_left
        view, draft = self._view(), self._draft(min(max(ROUND, kernels), left), kernels)
        local = ceil(LOCAL_SHARE * draft.size)
        draft.take(view.by_expectation(self._neighbours()), most=local)  # whether the model sees a gain there or not
        draft.take(self._strays(draft.size))
        pool = self._unseen(self._pool if kernels else self._terrain.compiled)
        draft.take(view.promising(pool, 2 * draft.size))
        return draft

    def _view(self) -> View:
        return View(self._terrain, self._times, self._elsewhere)

    def _draft(self, size: int, kernels: int) -> Draft:
        return Draft(size, kernels, {*self._asked, *self._times}, self._compiled)

    def _unseen(self, configs: Iterable[MoEKernelConfig]) -> list[MoEKernelConfig]:
        return [config for config in configs if config not in self._asked and config not in self._times]

    def _passed_on(self) -> list[MoEKernelConfig]:
        """Return the best of the near token counts: the winner of each, then its second..."""
        log_of, role, tokens = self._terrain.log, self._terrain.problem.role, self._terrain.tokens
        done = [count for count in log_of.counts(role) if count != tokens]
        near = [
            *[count for count in done if count < tokens][-NEAR_COUNTS:],
            *[count for count in done if count > tokens][:NEAR_COUNTS],
        ]
        near.sort(key=lambda count: abs(log(count / tokens)))
        ranked = [_fastest(log_of.times_us(role, count), ELITES) for count in near]
        found = [configs[place] for place in range(ELITES) for configs in ranked if place < len(configs)]
        return [config for config in found if config in self._compiled]  # a height may make no sense here

    def _neighbours(self) -> list[MoEKernelConfig]:
        """Return the unseen neighbours of the best ones."""
        parents = _fastest(self._times, ELITES)
        return self._unseen(dict.fromkeys(other for parent in parents for other in self._terrain.neighbours(parent)))

    def _strays(self, size: int) -> list[MoEKernelConfig]:
        due = (len(self._asked) + size) // STRAY - len(self._asked) // STRAY
        unseen = self._unseen(self._terrain.compiled)
        return self._random.sample(unseen, min(due, len(unseen)))


def _fastest(times_us: Mapping[MoEKernelConfig, float], count: int) -> list[MoEKernelConfig]:
    ran = [config for config, time_us in times_us.items() if time_us < inf]
    return sorted(ran, key=lambda config: times_us[config])[:count]
