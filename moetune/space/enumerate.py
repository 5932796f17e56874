"""Every config that a device can run for one GEMM of a shape, and the counted reasons of those that it cannot."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from moetune.space.load import MANY_ROWS, ExpertLoad, sensible_block_ms
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import MoEShape

BLOCK_NS = (16, 32, 64, 128, 256)
BLOCK_KS = (32, 64, 128, 256)
WARPS = (2, 4, 8)
STAGES = (2, 3, 4, 5, 6)
# Enough row tiles of one expert side by side that its weights are read from L2, few enough that the rows stay there.
GROUPED_ROW_TILES = 8


@dataclass(frozen=True, slots=True)
class Enumeration:
    """The configs that can run, and how many were removed for which reason (numbers in a reason become ``N``)."""

    configs: tuple[MoEKernelConfig, ...]
    removed: Counter[str]


def enumerate_configs(shape: MoEShape, device: DeviceInfo, role: Role, tokens: Sequence[int]) -> Enumeration:
    """Return every tile, warp count, prefetch distance and structure that ``why_not`` allows for ``tokens``.

    ``group_m`` is not enumerated: each ``block_m`` gets its starting value, and the finalists try the others.
    """
    kept: list[MoEKernelConfig] = []
    removed: Counter[str] = Counter()
    for config in _product(shape, device, role, tokens):
        reason = config.why_not(device, shape, role) or _pointless(config, shape, role)
        if reason is None:
            kept.append(config)
        else:
            removed[reason_class(reason)] += 1
    return Enumeration(tuple(kept), removed)


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


def _product(shape: MoEShape, device: DeviceInfo, role: Role, tokens: Sequence[int]) -> Iterator[MoEKernelConfig]:
    block_ms = sorted({block_m for count in tokens for block_m in sensible_block_ms(shape, count)})
    structures = [item for item in Structure if role is Role.GATE_UP or item is not Structure.TMA_PERMUTE]
    for structure, block_m in product(structures, block_ms):
        group_m = starting_group_m(shape, tokens, block_m)
        for block_n, block_k, num_warps, stages in product(BLOCK_NS, BLOCK_KS, WARPS, STAGES):
            yield MoEKernelConfig(
                structure=structure,
                block_m=block_m,
                block_n=block_n,
                block_k=block_k,
                num_warps=num_warps,
                prefetch_distance=stages,
                group_m=group_m,
                warp_size=device.warp_size,
            )


def _pointless(config: MoEKernelConfig, shape: MoEShape, role: Role) -> str | None:
    """Say why a config that runs is another one in disguise, or wastes most of its threads."""
    depth, columns = (shape.hidden, shape.inter) if role is Role.GATE_UP else (shape.inter, shape.hidden)
    if config.block_n >= 2 * columns and config.block_n > BLOCK_NS[0]:
        return f"block_n={config.block_n} is at least twice the {columns} columns"
    steps = -(-depth // config.block_k)
    if config.prefetch_distance > max(steps, STAGES[0]):
        return f"prefetch_distance={config.prefetch_distance} is more than the {steps} steps of the inner dimension"
    if config.block_m * config.block_n < 4 * config.block_size:
        return f"a {config.block_m}x{config.block_n} tile gives {config.num_warps} warps nothing to do"
    return None
