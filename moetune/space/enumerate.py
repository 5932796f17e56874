"""Every config that a device can run for one GEMM of a shape, and the counted reasons of those that it cannot."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import ceil

from moetune.space.axes import BLOCK_KS, BLOCK_NS, NAMES, STAGES, WARPS, Axes, built_in, config_of
from moetune.space.limits import FREE, Limits, without_ceiling
from moetune.space.load import MANY_ROWS, ExpertLoad, sensible_block_ms
from moetune.space.occupancy import MOST_REGISTERS, STEADY_CAPS, blocks_by_registers, blocks_by_smem, register_caps
from moetune.space.prior import Problem
from moetune_kernels.config import BLOCK_SIZES, MoEKernelConfig, Role, Structure
from moetune_kernels.shape import MoEShape

# Enough row tiles of one expert side by side that its weights are read from L2, few enough that the rows stay there.
GROUPED_ROW_TILES = 8


@dataclass(frozen=True)
class Ground:
    """One GEMM at some token counts under a user's limits: what can run there, what is worth it, and what is the same."""

    problem: Problem
    tokens: tuple[int, ...]
    limits: Limits = FREE

    def why_not(self, config: MoEKernelConfig) -> str | None:
        """Say why a config cannot run, or is no use at any of the token counts; limits are no such reason."""
        problem = self.problem
        return config.why_not(problem.device, problem.shape, problem.role) or self._pointless(config)

    def why_not_cap(self, config: MoEKernelConfig, cap: int) -> str | None:
        """Say why a config that runs without a cap cannot run with one, or wins nothing by it."""
        return config.why_not_cap(cap, self.problem.role) or self._idle_cap(config, cap)

    def why_outside(self, config: MoEKernelConfig) -> str | None:
        """Say which limit removes a config before it is compiled."""
        if not self._is_limited:
            return None
        problem = self.problem
        return self.limits.why_not(config, problem.role) or self.limits.why_never(
            config, problem.role, problem.shape, problem.device
        )

    def clamped(self, config: MoEKernelConfig) -> MoEKernelConfig:
        """Return the config with every choice lowered to what has an effect: two with one clamped form run alike.

        Buffers beyond the steps of the inner dimension stay empty, rows of one tile cannot be grouped, a cap of all
        registers is none, and a ceiling changes nothing of what is compiled.
        """
        prefetch = min(config.prefetch_distance, self._most_stages[config.block_k])
        group_m = 1 if self._most_tokens <= config.block_m else config.group_m
        cap = None if config.max_registers == MOST_REGISTERS else config.max_registers
        if (prefetch, group_m, cap) != (config.prefetch_distance, config.group_m, config.max_registers):
            config = replace(config, prefetch_distance=prefetch, group_m=group_m, max_registers=cap)
        return without_ceiling(config)

    def caps(self, config: MoEKernelConfig) -> tuple[int, ...]:
        """Return the register caps of a tile: those at which one more block fits, the steady ones, the user's own."""
        if self.problem.device.is_amd:
            return ()  # no such option there
        caps, own = register_caps(config.block_size), self.limits.max_registers
        if own is None or own in caps or own == MOST_REGISTERS:
            return caps
        return tuple(sorted((*caps, own), reverse=True))

    @cached_property
    def block_ms(self) -> tuple[int, ...]:
        """The tile heights that are worth a measurement at one of the token counts."""
        shape = self.problem.shape
        return tuple(sorted({block_m for count in self.tokens for block_m in sensible_block_ms(shape, count)}))

    @cached_property
    def _is_limited(self) -> bool:
        return self.limits.any

    @cached_property
    def _most_tokens(self) -> int:
        return max(self.tokens)

    @cached_property
    def _most_stages(self) -> dict[int, int]:
        """The deepest prefetch that has an effect, by ``block_k``."""
        return {block_k: max(ceil(self.problem.depth / block_k), STAGES[0]) for block_k in BLOCK_SIZES}

    @cached_property
    def _blocks_by_smem(self) -> Callable[[int], int]:
        @lru_cache(maxsize=1024)
        def found(smem_bytes: int) -> int:
            return blocks_by_smem(smem_bytes, self.problem.device)

        return found

    def _pointless(self, config: MoEKernelConfig) -> str | None:
        """Say why a config that runs wastes most of its threads, or what it takes away from others for nothing."""
        problem = self.problem
        if config.block_n >= 2 * problem.columns and config.block_n > BLOCK_NS[0]:
            return f"block_n={config.block_n} is at least twice the {problem.columns} columns"
        if config.block_m * config.block_n < 4 * config.block_size:
            return f"a {config.block_m}x{config.block_n} tile gives {config.num_warps} warps nothing to do"
        if config.block_m not in self.block_ms:
            return f"block_m={config.block_m} is no tile height for the rows that these token counts give an expert"
        return self._idle_cap(config, config.max_registers)

    def _idle_cap(self, config: MoEKernelConfig, cap: int | None) -> str | None:
        """Say when the room that a cap makes on the multiprocessor stays empty, because shared memory is full."""
        problem = self.problem
        if cap is None or cap in STEADY_CAPS or cap == self.limits.max_registers or self._is_named(cap):
            return None
        room = blocks_by_registers(cap, config.block_size)
        fits = self._blocks_by_smem(config.smem_estimate(problem.device.sm, problem.shape, problem.role))
        return f"max_registers={cap} makes room for {room} blocks, shared memory for {fits}" if room > fits else None

    def _is_named(self, cap: int) -> bool:
        allowed = self.limits.allowed(self.problem.role)
        return allowed is not None and (
            any(config.max_registers == cap for config in allowed.listed)
            or (allowed.axes is not None and cap in allowed.axes.values.get("max_registers", ()))
        )


@dataclass(slots=True)
class Enumeration:
    """What became of every config: legal, or removed for a reason (its numbers become ``N``), by a limit, as a duplicate.

    Args:
        legal: each clamped form's first config.
        removed: reasons why the others cannot run or are no use.
        outside: how many of those that can run each limit removed.
        duplicates: how many were another one once clamped.
        enumerated: all of them.
    """

    legal: dict[MoEKernelConfig, MoEKernelConfig] = field(default_factory=dict[MoEKernelConfig, MoEKernelConfig])
    removed: Counter[str] = field(default_factory=Counter[str])
    outside: Counter[str] = field(default_factory=Counter[str])
    duplicates: int = 0
    enumerated: int = 0

    @property
    def configs(self) -> tuple[MoEKernelConfig, ...]:
        """The legal configs in the order of enumeration."""
        return tuple(self.legal.values())

    def drop(self, reason: str, count: int = 1) -> None:
        """Count configs that cannot run."""
        self.enumerated += count
        self.removed[reason_class(reason)] += count

    def take(self, config: MoEKernelConfig, ground: Ground) -> None:
        """Count one config, and keep it when nothing speaks against it."""
        reason = ground.why_not(config)
        if reason is not None:
            self.drop(reason)
        else:
            self.keep(config, ground)

    def keep(self, config: MoEKernelConfig, ground: Ground) -> None:
        """Count one config that can run, and keep it unless a limit removes it or another one stands for it."""
        self.enumerated += 1
        outside, clamped = ground.why_outside(config), ground.clamped(config)
        if outside is not None:
            self.outside[outside] += 1
        elif clamped in self.legal:
            self.duplicates += 1
        else:
            self.legal[clamped] = without_ceiling(config)


def enumerate_configs(ground: Ground) -> Enumeration:
    """Return every structure, tile, warp count, prefetch distance and register cap, told apart by what becomes of it.

    Beside the built-in values these are those that a space file names: what it leaves out is counted, not unseen.
    ``group_m`` is not enumerated unless a file names it: each ``block_m`` gets its starting value, and the finalists try
    the others.
    """
    found = Enumeration()
    structures = _structures(ground.problem.role)
    own = _Maker(ground, Axes(), structures)
    for base, capped in own.families():
        reason = ground.why_not(base)
        if reason is not None:
            found.drop(reason, 1 + len(capped))  # what is wrong with a tile is wrong with every cap of it
            continue
        found.keep(base, ground)
        for cap in capped:
            reason = ground.why_not_cap(base, cap)
            if reason is not None:
                found.drop(reason)
            else:
                found.keep(_with_cap(base, cap), ground)
    allowed = ground.limits.allowed(ground.problem.role)
    if allowed is None:
        return found
    named = () if allowed.axes is None else _Maker(ground, allowed.axes, structures).configs()
    listed = dict.fromkeys(
        config for config in allowed.listed if allowed.axes is None or not allowed.axes.holds(config)
    )
    for config in (*named, *listed):
        if not own.makes(config):
            found.take(config, ground)
    return found


@lru_cache(maxsize=1 << 12)
def reason_class(reason: str) -> str:
    """Return a reason with its numbers replaced, so that like reasons are counted together.

    >>> reason_class("needs 262,144 B of shared memory, the limit is 232,448 B")
    'needs N B of shared memory, the limit is N B'
    """
    return re.sub(r"\d[\d,.]*", "N", reason)


def starting_group_m(shape: MoEShape, tokens: Sequence[int], block_m: int) -> int:
    """Return the ``group_m`` of the first pass: grouped only where one expert fills several row tiles."""
    rows = max(ExpertLoad.of(shape, count).rows for count in tokens)
    return GROUPED_ROW_TILES if block_m >= 64 and rows > MANY_ROWS else 1


def _structures(role: Role) -> tuple[Structure, ...]:
    return tuple(item for item in Structure if role is Role.GATE_UP or item is not Structure.TMA_PERMUTE)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the configs of some axes; those that are not named are the built-in ones."""

    ground: Ground
    axes: Axes
    structures: tuple[Structure, ...]

    def families(self) -> Iterator[tuple[MoEKernelConfig, tuple[int, ...]]]:
        """Yield each tile with its first cap, and the other caps that it is tried with."""
        ground, problem = self.ground, self.ground.problem
        group_ms = {block_m: starting_group_m(problem.shape, ground.tokens, block_m) for block_m in ground.block_ms}
        free_group_m, free_caps = "group_m" not in self.axes.values, "max_registers" not in self.axes.values
        for choice in self.axes.choices(built_in(ground.block_ms, self.structures)):
            if free_group_m:
                choice = (*choice[:-1], group_ms.get(choice[NAMES.index("block_m")], 1))  # noqa: PLW2901
            base = config_of(choice, problem.device.warp_size)
            yield base, ground.caps(base) if free_caps else ()

    def configs(self) -> Iterator[MoEKernelConfig]:
        """Yield every config."""
        for base, caps in self.families():
            yield base
            yield from (_with_cap(base, cap) for cap in caps)

    def makes(self, config: MoEKernelConfig) -> bool:
        """Whether the config is one of the built-in ones."""
        ground = self.ground
        return (
            config.structure in self.structures
            and config.block_m in ground.block_ms
            and (config.block_n in BLOCK_NS and config.block_k in BLOCK_KS)
            and (config.num_warps in WARPS and config.prefetch_distance in STAGES)
            and (config.max_registers is None or config.max_registers in ground.caps(config))
            and config.group_m == starting_group_m(ground.problem.shape, ground.tokens, config.block_m)
            and (config.split_k, config.warp_size) == (1, ground.problem.device.warp_size)
        )


def _with_cap(base: MoEKernelConfig, cap: int | None) -> MoEKernelConfig:
    """Return an enumerated config with another register cap."""
    choice = (
        base.structure,
        base.block_m,
        base.block_n,
        base.block_k,
        base.num_warps,
        base.prefetch_distance,
        cap,
        base.group_m,
    )
    return config_of(choice, base.warp_size)
