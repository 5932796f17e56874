"""What finished token counts teach the next one: which configs are promising there, hopeless, or winners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moetune.engine.schedule import nearest
from moetune.space import Space, sensible_block_ms
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.plan import LayerPlan

REACH = 8.0  # times the token count; further away another bottleneck rules
# This far behind the best at every near count: in two recorded ladders no winner was over 1.16 times it there.
HOPELESS_RATIO = 1.3


@dataclass
class Memory:
    """Times over the best, per role and finished token count, and the winning plans."""

    ratios: dict[tuple[Role, int], dict[MoEKernelConfig, float]] = field(
        default_factory=dict[tuple[Role, int], dict[MoEKernelConfig, float]]
    )
    winners: dict[int, LayerPlan] = field(default_factory=dict[int, LayerPlan])

    def pool(self, space: Space, compiled: Sequence[MoEKernelConfig], tokens: int) -> list[MoEKernelConfig]:
        """Return the compiled configs worth racing at ``tokens``, the most promising first.

        What was measured at this very count decides the order, else at near ones; a guess from tiles and waves orders
        the rest.
        """
        sensible = set(sensible_block_ms(space.shape, tokens))
        guessed = space.by_promise([config for config in compiled if config.block_m in sensible], tokens)
        near = [self.ratios[space.role, count] for count in nearest(self._done(space.role), tokens, REACH)]
        known = dict(self.ratios.get((space.role, tokens), {}))
        for config in guessed:
            if config in known:
                continue
            seen = [ratios[config] for ratios in near if config in ratios]
            if seen:
                known[config] = min(seen)
        measured = sorted((config for config in guessed if config in known), key=lambda config: known[config])
        hopeful = [config for config in measured if known[config] <= HOPELESS_RATIO]
        return hopeful + [config for config in guessed if config not in known]

    def neighbours(self, tokens: int) -> list[LayerPlan]:
        """Return the winners of the nearest finished token counts."""
        found = [self.winners[count] for count in nearest(list(self.winners), tokens, REACH)]
        return list(dict.fromkeys(found))

    def _done(self, role: Role) -> list[int]:
        return [count for known_role, count in self.ratios if known_role is role]
