"""What finished token counts teach the next one: every trial of the sweep, and the winning plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from moetune.engine.schedule import Quota, nearest
from moetune.space import Space, sensible_block_ms
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
        sensible = set(sensible_block_ms(space.shape, tokens))

        def guess(config: MoEKernelConfig, count: int) -> float:
            key = space.role, count, config
            if key not in self.guesses:
                self.guesses[key] = predict(config, problem, count)
            return self.guesses[key]

        is_compiled = dict.fromkeys(config for config in compiled if config.block_m in sensible)
        reserve = (*space.configs, *space.reserve)
        return Terrain(
            problem=problem,
            tokens=tokens,
            compiled=tuple(sorted(is_compiled, key=lambda config: guess(config, tokens))),
            reserve=tuple(config for config in reserve if config.block_m in sensible and config not in is_compiled),
            neighbours=lambda config: space.neighbours(config, tokens),
            guess=guess,
            kernels=quota.kernels,
            trials=quota.trials,
            seeds=tuple(seeds),
            log=self.log,
        )

    def neighbours(self, tokens: int) -> list[LayerPlan]:
        """Return the winners of the nearest finished token counts."""
        found = [self.winners[count] for count in nearest(list(self.winners), tokens, REACH)]
        return list(dict.fromkeys(found))
