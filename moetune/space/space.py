"""The search space of one GEMM: selected candidates, their neighbours, and what was removed and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import log2

from moetune.space.enumerate import BLOCK_KS, BLOCK_NS, STAGES, WARPS, enumerate_configs
from moetune.space.load import ExpertLoad
from moetune.space.prior import Problem
from moetune.space.select import promises, select
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import DeviceInfo
from moetune_kernels.errors import UnsupportedConfigError
from moetune_kernels.shape import MoEShape

GROUP_MS = (1, 4, 8, 16, 32)
REGISTER_CAPS = (128, 168)  # one more block per multiprocessor at 4 warps and 8 warps on sm_90
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
        legal: how many configs ``why_not`` let through before the selection.
        removed: reasons and how often, with their numbers replaced.
        closed: no config outside ``configs`` can be answered (replay).
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
    reserve: tuple[MoEKernelConfig, ...] = ()

    def by_promise(self, configs: Sequence[MoEKernelConfig], tokens: int) -> list[MoEKernelConfig]:
        """Return ``configs`` with the most promising for ``tokens`` first; equal guesses keep their order."""
        problem = Problem(self.shape, self.device, self.role)
        promise = promises(configs, problem, (tokens,))
        return sorted(configs, key=lambda config: promise[config])

    def neighbours(self, config: MoEKernelConfig, tokens: int) -> list[MoEKernelConfig]:
        """Return the legal configs that differ from ``config`` in one choice, those that change most first."""
        found: dict[MoEKernelConfig, None] = {}
        for moved in self._moves(config, tokens):
            if moved.why_not(self.device, self.shape, self.role) is None:
                found[moved] = None
        found.pop(config, None)
        return [moved for moved in found if not self.closed or moved in self.configs]

    def _moves(self, config: MoEKernelConfig, tokens: int) -> Iterator[MoEKernelConfig]:
        groups = _nearest_first(config.group_m) if ExpertLoad.of(self.shape, tokens).rows > config.block_m else ()
        # How row tiles are grouped changes nothing while an expert has one.
        yield from (replace(config, group_m=group_m) for group_m in groups[:2])
        yield from (replace(config, structure=structure) for structure in Structure)
        for name, values in (("prefetch_distance", STAGES), ("block_n", BLOCK_NS)):
            yield from _steps(config, name, values)
        yield from (replace(config, group_m=group_m) for group_m in groups[2:])
        for name, values in (("num_warps", WARPS), ("block_k", BLOCK_KS)):
            yield from _steps(config, name, values)
        if config.max_registers is None:
            yield from (replace(config, max_registers=cap) for cap in REGISTER_CAPS)


def _nearest_first(group_m: int) -> tuple[int, ...]:
    """Return the other values of ``group_m``, the nearest first."""
    others = [value for value in GROUP_MS if value != group_m]
    return tuple(sorted(others, key=lambda value: abs(log2(value / group_m))))


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
) -> Space:
    """Return at most ``limit`` candidates of ``role`` for the token counts asked.

    >>> from moetune_kernels.device import TARGETS
    >>> shape = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
    >>> len(candidates(shape, TARGETS["sm_90"], Role.DOWN, (1, 64, 4096), limit=40).configs)
    40
    """
    found = enumerate_configs(shape, device, role, tokens)
    chosen = select(found.configs, Problem(shape, device, role), tokens, limit)
    taken = set(chosen)
    reserve = tuple(config for config in found.configs if config not in taken)
    return Space(shape, device, role, tuple(tokens), chosen, len(found.configs), found.removed, reserve=reserve)


def recorded_space(
    shape: MoEShape, device: DeviceInfo, role: Role, tokens: Sequence[int], configs: Sequence[MoEKernelConfig]
) -> Space:
    """Return the space of recorded candidates: nothing else can be answered."""
    return Space(shape, device, role, tuple(tokens), tuple(configs), len(configs), closed=True)
