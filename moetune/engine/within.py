"""A user's limits while a sweep runs: which plans may win, and what is said where that costs time or an entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetune.engine.bench import Bench
from moetune.engine.events import Emit, SpaceCompiled
from moetune.engine.finals import Verdict
from moetune.errors import UsageError
from moetune.outcome import Failed
from moetune.space import Space, sensible_block_ms
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.plan import LayerPlan


@dataclass(frozen=True, slots=True)
class Within:
    """The limits of both GEMMs, checked against what the compiler reported."""

    spaces: Mapping[Role, Space]
    bench: Bench

    def why_outside(self, role: Role, config: MoEKernelConfig) -> str | None:
        """Say which limit removes a kernel, or None."""
        return self.spaces[role].why_outside(config, self.bench.compiled.get((role, config)))

    def holds(self, plan: LayerPlan) -> bool:
        """Whether both kernels of a plan are inside the limits."""
        return self.why_plan_outside(plan) is None

    def why_plan_outside(self, plan: LayerPlan) -> str | None:
        """Say which limit removes a plan, naming the kernel, or None."""
        reasons = {role: self.why_outside(role, plan.config(role)) for role in Role}
        return next((f"{role.value}: {reason}" for role, reason in reasons.items() if reason is not None), None)

    def report(self, tokens: Sequence[int], emit: Emit) -> None:
        """Say how many compiled candidates are inside, and refuse limits that leave a GEMM or every token count none.

        Raises:
            UsageError: saying which limit removed how many, by what the compiler reported.
        """
        said = [self._compiled(role) for role in Role]
        for space in said:
            emit(space)
        removed = "; ".join(f"{space.role.value}: {_counted(space)}" for space in said if space.outside)
        empty = [space.role.value for space in said if not space.inside]
        if removed and empty:
            raise UsageError(f"no compiled kernel is left for {' and '.join(empty)}: {removed}; widen the limits")
        heights = {role: {config.block_m for config in self.bench.inside(role)} for role in Role}
        shared, shape = heights[Role.GATE_UP] & heights[Role.DOWN], self.bench.backend.shape
        if removed and not any(shared.intersection(sensible_block_ms(shape, count)) for count in tokens):
            both = " and ".join(f"{role.value} keeps {sorted(kept)}" for role, kept in heights.items())
            raise UsageError(
                f"no token count has a block_m left that both GEMMs share: {both}; {removed}; widen the limits"
            )

    def _compiled(self, role: Role) -> SpaceCompiled:
        """Return how many compiled candidates are inside, and which limit removed how many of the others."""
        known = [config for config in self.spaces[role].configs if (role, config) in self.bench.compiled]
        reasons = [self.why_outside(role, config) for config in known]
        outside = Counter(reason for reason in reasons if reason is not None)
        return SpaceCompiled(role, len(known) - outside.total(), outside)

    def explained(self, verdict: Verdict | Failed, default: LayerPlan) -> Verdict | Failed:
        """Return the verdict; of a failed one the reason says too when the default plan was timed but may not win."""
        outside = self.why_plan_outside(default) if isinstance(verdict, Failed) else None
        if outside is None or not isinstance(verdict, Failed):
            return verdict
        nothing = f"nothing inside the limits ran and was right ({verdict.reason})"
        return Failed(verdict.kind, f"{nothing}, and the default plan is outside: {outside}")

    def cost(self, verdict: Verdict, default: LayerPlan) -> str | None:
        """Return the sentence about a winner that is slower than a default plan outside the limits, else None."""
        outside, us = self.why_plan_outside(default), verdict.winner.measured.median_us
        if outside is None or verdict.baseline_us is None or us <= verdict.baseline_us:
            return None
        return (
            f"the limits cost {us / verdict.baseline_us - 1:.1%} against the default plan, which is outside: {outside}"
        )


def _counted(space: SpaceCompiled) -> str:
    return ", ".join(f"{limit}: {count:,} removed" for limit, count in space.outside.items())
