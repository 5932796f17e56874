"""The search space of one GEMM: selected candidates, their neighbours, and what was removed and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import log2
from types import MappingProxyType

from moetune.outcome import Compiled
from moetune.space.axes import BLOCK_KS, BLOCK_NS, GROUP_MS, STAGES, WARPS
from moetune.space.enumerate import Ground, enumerate_configs, starting_group_m
from moetune.space.limits import FREE, Limits
from moetune.space.load import ExpertLoad, sensible_block_ms
from moetune.space.occupancy import STEADY_CAPS, smem_ceiling
from moetune.space.pool import Pool
from moetune.space.prior import Problem
from moetune.space.select import Selector, promises, select
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import DeviceInfo
from moetune_kernels.errors import UnsupportedConfigError
from moetune_kernels.shape import MoEShape

DEFAULT_LIMIT = 160  # candidates of one role: about 320 kernels are 25 s in 15 compile workers


@dataclass(frozen=True, slots=True)
class Space:
    """What may be tried for one role.

    Args:
        shape: the layer.
        device: the GPU that the configs are legal on.
        role: which GEMM.
        tokens: the token counts that the space is for.
        configs: the candidates, the order to compile them in.
        legal: how many configs are left for the selection.
        removed: reasons why others cannot run and how often, with their numbers replaced.
        closed: no config outside ``configs`` can be answered (replay).
        limits: what the user allows.
        outside: how many configs that can run each limit removed.
        duplicates: how many configs were another one once every choice is lowered to what has an effect.
        heights: the tile heights that are left.
        ceilings: legal configs by the lowest shared-memory ceiling that they keep to, as far as the estimate tells.
        firsts: the config that stands for all with the same clamped form.
        reserve: legal configs that were not chosen: a search may still ask for them.
    """

    shape: MoEShape
    device: DeviceInfo
    role: Role
    tokens: tuple[int, ...]
    configs: tuple[MoEKernelConfig, ...]
    legal: int
    removed: Counter[str] = field(default_factory=Counter[str])
    closed: bool = False
    limits: Limits = FREE
    outside: Counter[str] = field(default_factory=Counter[str])
    duplicates: int = 0
    heights: frozenset[int] = frozenset()
    ceilings: Counter[int] = field(default_factory=Counter[int])
    firsts: Mapping[MoEKernelConfig, MoEKernelConfig] = field(default_factory=dict[MoEKernelConfig, MoEKernelConfig])
    reserve: tuple[MoEKernelConfig, ...] = ()
    _pools: dict[frozenset[int], Pool] = field(
        default_factory=dict[frozenset[int], Pool], init=False, repr=False, compare=False
    )
    _beside: dict[tuple[MoEKernelConfig, bool], tuple[MoEKernelConfig, ...]] = field(
        default_factory=dict[tuple[MoEKernelConfig, bool], tuple[MoEKernelConfig, ...]],
        init=False,
        repr=False,
        compare=False,
    )

    def pool(self, tokens: int) -> Pool:
        """Return the candidates and the reserve whose tile heights make sense at ``tokens``, in this order."""
        sensible = frozenset(sensible_block_ms(self.shape, tokens))
        if not self._pools:
            everything, problem = (*self.configs, *self.reserve), Problem(self.shape, self.device, self.role)
            self._pools[frozenset()] = Pool(everything, problem)
        if sensible not in self._pools:
            self._pools[sensible] = self._pools[frozenset()].where(lambda config: config.block_m in sensible)
        return self._pools[sensible]

    def by_promise(self, configs: Sequence[MoEKernelConfig], tokens: int) -> list[MoEKernelConfig]:
        """Return ``configs`` with the most promising for ``tokens`` first; equal guesses keep their order."""
        problem = Problem(self.shape, self.device, self.role)
        promise = promises(configs, problem, (tokens,))
        return sorted(configs, key=lambda config: promise[config])

    def why_outside(self, config: MoEKernelConfig, compiled: Compiled | None) -> str | None:
        """Say which of the user's limits removes a config, given what the compiler reported of it, or None."""
        return self.limits.why_not_compiled(config, self.role, compiled)

    def block_ms(self, tokens: int) -> frozenset[int]:
        """Return the tile heights that make sense at ``tokens`` and are left."""
        return self.heights & set(sensible_block_ms(self.shape, tokens))

    def neighbours(self, config: MoEKernelConfig, tokens: int) -> list[MoEKernelConfig]:
        """Return the legal configs that differ from ``config`` in one choice, those that change most first.

        None is outside the limits, and none is another spelling of a config that was enumerated.
        """
        grouped = ExpertLoad.of(self.shape, tokens).rows > config.block_m
        if (config, grouped) not in self._beside:
            self._beside[config, grouped] = tuple(self._legal_moves(config, grouped=grouped))
        return list(self._beside[config, grouped])

    def _legal_moves(self, config: MoEKernelConfig, *, grouped: bool) -> list[MoEKernelConfig]:
        ground = Ground(Problem(self.shape, self.device, self.role), self.tokens, self.limits)
        found: dict[MoEKernelConfig, None] = {}
        for moved in self._moves(config, ground, grouped=grouped):
            if ground.why_not(moved) is None and ground.why_outside(moved) is None and self._is_first(moved, ground):
                found[moved] = None
        found.pop(config, None)
        return [moved for moved in found if not self.closed or moved in self.configs]

    def _is_first(self, config: MoEKernelConfig, ground: Ground) -> bool:
        """Whether no other config stands for this one; a ``group_m`` that was not enumerated is as its tile's own."""
        known = self.firsts.get(ground.clamped(config))
        if known is None:
            config = replace(config, group_m=starting_group_m(self.shape, self.tokens, config.block_m))
            known = self.firsts.get(ground.clamped(config), config)
        return known == config

    def _moves(self, config: MoEKernelConfig, ground: Ground, *, grouped: bool) -> Iterator[MoEKernelConfig]:
        # How row tiles are grouped changes nothing while an expert has one.
        groups = _nearest_first(config.group_m, self._values("group_m", GROUP_MS)) if grouped else ()
        yield from (replace(config, group_m=group_m) for group_m in groups[:2])
        yield from (replace(config, structure=structure) for structure in Structure)
        for name, values in (("prefetch_distance", STAGES), ("block_n", BLOCK_NS)):
            yield from _steps(config, name, self._values(name, values))
        yield from (replace(config, group_m=group_m) for group_m in groups[2:])
        for name, values in (("num_warps", WARPS), ("block_k", BLOCK_KS)):
            yield from _steps(config, name, self._values(name, values))
        caps = self._values("max_registers", ground.caps(config))
        yield from (replace(config, max_registers=cap) for cap in _caps_beside(config.max_registers, caps))

    def _values(self, name: str, built_in: tuple[int, ...]) -> tuple[int, ...]:
        """Return the values of an axis: those of the space file where it names them, ascending, no cap left out."""
        allowed = self.limits.allowed(self.role)
        if allowed is None or allowed.axes is None or name not in allowed.axes.values:
            return built_in
        named: list[int] = [value for value in allowed.axes.values[name] if value is not None]
        return tuple(sorted(named))


def _nearest_first(group_m: int, values: tuple[int, ...]) -> tuple[int, ...]:
    """Return the other values of ``group_m``, the nearest first."""
    others = [value for value in values if value != group_m]
    return tuple(sorted(others, key=lambda value: abs(log2(value / group_m))))


def _caps_beside(cap: int | None, caps: tuple[int, ...]) -> list[int | None]:
    """Return every cap for a config without one, the steady ones first; else no cap and the caps beside its own."""
    lowest_first = sorted(caps)
    if cap is None:
        steady_first: list[int] = sorted(caps, key=lambda value: (value not in STEADY_CAPS, -value))
        return [*steady_first]
    below = [other for other in lowest_first if other < cap][-1:]
    above = [other for other in lowest_first if other > cap][:1]
    return [None, *above, *below]


def _steps(config: MoEKernelConfig, name: str, values: tuple[int, ...]) -> Iterator[MoEKernelConfig]:
    """Yield ``config`` one step up and one step down the axis ``name``."""
    current = getattr(config, name)
    if current not in values:
        return
    place = values.index(current)
    for other in (place + 1, place - 1):
        if 0 <= other < len(values):
            yield _moved(config, name, values[other])


def _moved(config: MoEKernelConfig, name: str, value: int) -> MoEKernelConfig:
    try:
        return replace(config, **{name: value})
    except UnsupportedConfigError:
        return config


def candidates(
    shape: MoEShape,
    device: DeviceInfo,
    role: Role,
    tokens: Sequence[int],
    limit: int = DEFAULT_LIMIT,
    limits: Limits = FREE,
) -> Space:
    """Return at most ``limit`` candidates of ``role`` for the token counts asked, inside a user's ``limits``.

    >>> from moetune_kernels.device import TARGETS
    >>> shape = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
    >>> len(candidates(shape, TARGETS["sm_90"], Role.DOWN, (1, 64, 4096), limit=40).configs)
    40
    """
    if limits.any:  # a space file's tables are no key
        return _candidates(Problem(shape, device, role), tuple(tokens), limit, limits)
    found = _free_candidates(Problem(shape, device, role), tuple(tokens), limit)
    return replace(found, removed=found.removed.copy(), outside=found.outside.copy(), ceilings=found.ceilings.copy())


@lru_cache(maxsize=16)
def _free_candidates(problem: Problem, tokens: tuple[int, ...], limit: int) -> Space:
    """Return the candidates without limits; what a caller could change in it is copied before it is given away."""
    return _candidates(problem, tokens, limit, FREE)


def _candidates(problem: Problem, tokens: tuple[int, ...], limit: int, limits: Limits) -> Space:
    ground = Ground(problem, tokens, limits)
    found = enumerate_configs(ground)
    selector = Selector(
        problem,
        tokens,
        lambda config: ground.why_not(config) is None and ground.why_outside(config) is None,
        limits.max_registers,
    )
    chosen = select(found.configs, selector, limit)
    return Space(
        problem.shape,
        problem.device,
        problem.role,
        tokens,
        chosen,
        len(found.legal),
        found.removed,
        limits=limits,
        outside=found.outside,
        duplicates=found.duplicates,
        heights=frozenset(config.block_m for config in found.configs),
        ceilings=_by_ceiling(found.configs, problem),
        firsts=MappingProxyType(found.legal),
        reserve=_reserve(found.configs, chosen, limits),
    )


def _by_ceiling(configs: Sequence[MoEKernelConfig], problem: Problem) -> Counter[int]:
    """Count configs by the lowest shared-memory ceiling that they keep to, as far as the estimate tells."""
    device = problem.device
    sizes = Counter(config.smem_estimate(device.sm, problem.shape, problem.role) for config in configs)
    found: Counter[int] = Counter()
    for smem_bytes, count in sizes.items():
        found[smem_ceiling(smem_bytes, device)] += count
    return found


def _reserve(
    configs: Sequence[MoEKernelConfig], chosen: Sequence[MoEKernelConfig], limits: Limits
) -> tuple[MoEKernelConfig, ...]:
    """Return what was not chosen; the guess knows no register caps, so only the user's own is offered in reserve."""
    taken = set(chosen)
    return tuple(
        config for config in configs if config not in taken and config.max_registers in (None, limits.max_registers)
    )


def recorded_space(
    shape: MoEShape,
    device: DeviceInfo,
    role: Role,
    tokens: Sequence[int],
    configs: Sequence[MoEKernelConfig],
    limits: Limits = FREE,
) -> Space:
    """Return the space of recorded candidates inside a user's ``limits``: nothing else can be answered.

    Shared memory and registers are left to what the compiler reported when they were recorded.
    """
    reasons = {config: limits.why_not(config, role) for config in configs}
    kept = tuple(config for config, reason in reasons.items() if reason is None)
    return Space(
        shape,
        device,
        role,
        tuple(tokens),
        kept,
        len(kept),
        closed=True,
        limits=limits,
        outside=Counter(reason for reason in reasons.values() if reason is not None),
        heights=frozenset(config.block_m for config in kept),
    )
