"""What finished token counts teach the next one: every trial of the sweep, and the winning plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from moetune.engine.schedule import Quota, nearest
from moetune.space import Space, sensible_block_ms
from moetune.space.pool import Pool
from moetune.space.prior import Problem, predict
from moetune.strategies.base import Terrain, TrialLog
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.plan import LayerPlan

REACH = 8.0  # times the token count; further away another bottleneck rules


@dataclass
class Memory:
    """The log that all searches of a sweep share, the winners, and the prior's guesses made so far."""

    log: TrialLog = field(default_factory=TrialLog)
    winners: dict[int, LayerPlan] = field(default_factory=dict[int, LayerPlan])
    guesses: dict[tuple[Role, int, MoEKernelConfig], float] = field(
        default_factory=dict[tuple[Role, int, MoEKernelConfig], float]
    )

    def terrain(
        self,
        space: Space,
        compiled: Iterable[MoEKernelConfig],
        tokens: int,
        quota: Quota,
        seeds: Iterable[MoEKernelConfig] = (),
    ) -> Terrain:
        """Return where a search may go at ``tokens``: the heights that make sense there, and what is known."""
        problem = Problem(space.shape, space.device, space.role)
        pool = space.pool(tokens)
        if quota.kernels:  # a search sorts what it may compile
            self._guess_all(space.role, pool, tokens)
        sensible = set(sensible_block_ms(space.shape, tokens))

        def guess(config: MoEKernelConfig, count: int) -> float:
            key = space.role, count, config
            known = self.guesses.get(key)
            if known is None:
                known = self.guesses[key] = predict(config, problem, count)
            return known

        is_compiled = dict.fromkeys(config for config in compiled if config.block_m in sensible)
        return Terrain(
            problem=problem,
            tokens=tokens,
            compiled=tuple(sorted(is_compiled, key=lambda config: guess(config, tokens))),
            reserve=tuple(config for config in pool.configs if config not in is_compiled),
            neighbours=lambda config: space.neighbours(config, tokens),
            guess=guess,
            kernels=quota.kernels,
            trials=quota.trials,
            seeds=tuple(seeds),
            log=self.log,
        )

    def _guess_all(self, role: Role, pool: Pool, tokens: int) -> None:
        keys = [(role, tokens, config) for config in pool.configs]
        if not all(key in self.guesses for key in keys):
            self.guesses.update(zip(keys, pool.times(tokens), strict=True))

    def neighbours(self, tokens: int) -> list[LayerPlan]:
        """Return the winners of the nearest finished token counts."""
        found = [self.winners[count] for count in nearest(list(self.winners), tokens, REACH)]
        return list(dict.fromkeys(found))
