"""A user's limits while a sweep runs: which plans may win, and what is said where that costs time or an entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetune.engine.bench import Bench
from moetune.engine.events import Emit, SpaceCompiled
from moetune.engine.finals import Verdict
from moetune.outcome import EVERY_COUNT, Failed, FailureKind
from moetune.space import Space, shared_heights
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

    def kept(self, role: Role) -> set[int]:
        """Return the tile heights at which a compiled kernel keeps to the limits."""
        return {config.block_m for config in self.bench.inside(role)}

    def unserved(self, tokens: Sequence[int]) -> list[int]:
        """Return the token counts that have no tile height at which both GEMMs have a compiled kernel inside."""
        both = self.kept(Role.GATE_UP) & self.kept(Role.DOWN)
        return [count for count in tokens if not both & shared_heights(self.spaces, count)]

    def report(self, emit: Emit) -> None:
        """Say how many compiled kernels are inside, and which limit removed how many of the others."""
        for role in Role:
            emit(self._compiled(role))

    def why_nothing(self, tokens: Sequence[int]) -> str | None:
        """Say what of the compiled kernels the limits removed where they leave a GEMM or every token count none, or None."""
        said = [self._compiled(role) for role in Role]
        counted = {space.role: [*_counted(space), *self._dropped(space.role)] for space in said}
        removed = "; ".join(f"{role.value}: {', '.join(parts)}" for role, parts in counted.items() if parts)
        empty = [space.role.value for space in said if not space.inside]
        if removed and empty:
            return f"no compiled kernel is left for {' and '.join(empty)}: {removed}"
        if removed and len(self.unserved(tokens)) == len(tokens):
            both = " and ".join(f"{role.value} keeps {sorted(self.kept(role))}" for role in Role)
            return f"no token count has a block_m left that both GEMMs share: {both}; {removed}"
        return None

    def _compiled(self, role: Role) -> SpaceCompiled:
        """Return how many compiled kernels that may win are inside, and which limit removed how many of the others."""
        space = self.spaces[role]
        known = [
            config for one, config in self.bench.compiled if one is role and space.limits.why_not(config, role) is None
        ]
        reasons = [self.why_outside(role, config) for config in known]
        outside = Counter(reason for reason in reasons if reason is not None)
        return SpaceCompiled(role, len(known) - outside.total(), outside)

    def _dropped(self, role: Role) -> list[str]:
        """Say how many kernels the compiler left without the room they need, as a register cap does, or nothing."""
        why_not, ended = self.spaces[role].limits.why_not, self.bench.ended(role, EVERY_COUNT).items()
        kinds = [end.kind for config, end in ended if isinstance(end, Failed) and why_not(config, role) is None]
        count = kinds.count(FailureKind.RESOURCES)
        return [f"{count:,} spill registers or need more than the GPU has"] if count else []

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


def _counted(space: SpaceCompiled) -> list[str]:
    return [f"{limit}: {count:,} removed" for limit, count in space.outside.items()]
