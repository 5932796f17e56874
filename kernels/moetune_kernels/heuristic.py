"""The default plan: what runs where no table answers, and the baseline that every tuned plan must beat.

The tiles below are where a search starts, not where it ends: on an A100 256 threads and at most 96 KB of shared memory,
on an H100 or H200 TMA once an expert has many rows. Every plan is checked by ``why_not`` before it is returned, and
shrunk until it can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import DeviceInfo
from moetune_kernels.errors import ShapeError, UnsupportedConfigError
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

# Mean rows per expert up to which each block_m is the default. A tile holds twice the mean, so that few experts
# spill into a second one. Plans with tiles of just the mean took 1.04 to 1.44 times the tuned time at 16 rows, 1.08 to
# 1.44 at 32 and 1.04 to 1.21 at 64 (three layers on one H200, reports/2026-12-01-h200-sweeps.md); these thresholds
# themselves were not timed yet, nor any on another device.
_ROWS = ((12, 16), (24, 32), (48, 64))
_LARGEST_BLOCK_M = 128
_SMALLEST = 16
_NEARLY = 0.9  # of the best filling is as good: a wider tile reads x less often
_ENOUGH_WAVES = 4  # from four full waves of tiles on, the last partial wave costs little


class _Tile(NamedTuple):
    """A starting point: columns, depth, warps, prefetch distance."""

    block_n: int
    block_k: int
    num_warps: int
    stages: int


class _Family(Enum):
    """Devices that start from the same tiles."""

    AMPERE = "sm_80: 164 KB of shared memory, no TMA"
    SMALL_SMEM = "sm_86, 89, 120: 99 KB of shared memory"
    HOPPER = "sm_90, 100: 227 KB of shared memory, TMA"
    CDNA = "gfx942: 64 KB of shared memory, warps of 64"


_G, _D = Role.GATE_UP, Role.DOWN
_TILES: dict[_Family, dict[int, dict[Role, _Tile]]] = {
    _Family.AMPERE: {  # 256 threads, at most 96 KB
        16: {_G: _Tile(64, 128, 8, 3), _D: _Tile(128, 128, 8, 3)},
        32: {_G: _Tile(64, 64, 8, 4), _D: _Tile(128, 64, 8, 4)},
        64: {_G: _Tile(64, 64, 8, 4), _D: _Tile(128, 64, 8, 4)},
        128: {_G: _Tile(64, 64, 8, 4), _D: _Tile(128, 64, 8, 4)},
    },
    _Family.SMALL_SMEM: {  # half the memory, so that two blocks share an SM
        16: {_G: _Tile(64, 64, 4, 3), _D: _Tile(64, 64, 4, 4)},
        32: {_G: _Tile(64, 64, 4, 3), _D: _Tile(128, 64, 4, 3)},
        64: {_G: _Tile(64, 64, 4, 3), _D: _Tile(128, 64, 4, 3)},
        128: {_G: _Tile(64, 64, 8, 3), _D: _Tile(128, 64, 8, 3)},
    },
    _Family.HOPPER: {  # two blocks per SM while weights bind, one large one when arithmetic does
        16: {_G: _Tile(64, 128, 4, 4), _D: _Tile(128, 128, 4, 4)},
        32: {_G: _Tile(64, 64, 4, 5), _D: _Tile(128, 64, 4, 5)},
        64: {_G: _Tile(64, 64, 4, 4), _D: _Tile(128, 64, 4, 4)},
        128: {_G: _Tile(128, 64, 8, 4), _D: _Tile(256, 64, 8, 3)},
    },
    _Family.CDNA: {
        16: {_G: _Tile(64, 128, 4, 2), _D: _Tile(128, 128, 4, 2)},
        32: {_G: _Tile(64, 64, 4, 2), _D: _Tile(128, 64, 4, 2)},
        64: {_G: _Tile(64, 64, 4, 2), _D: _Tile(128, 64, 4, 2)},
        128: {_G: _Tile(64, 64, 4, 2), _D: _Tile(128, 64, 4, 2)},
    },
}


def heuristic_plan(shape: MoEShape, tokens: int, device: DeviceInfo) -> LayerPlan:
    """Return the default plan for ``tokens`` of ``shape`` on ``device``; it always passes ``why_not``.

    Args:
        shape: the layer; the model's expert count, where known, tells how many rows an expert gets.
        tokens: T, 0 or more.
        device: where it will run.

    Raises:
        ShapeError: ``tokens`` is negative.
        UnsupportedConfigError: no kernel runs this weight format, or this device at all.
    """
    if tokens < 0:
        raise ShapeError(f"tokens must be 0 or more, got {tokens}")
    block_m = _block_m(shape, tokens)
    tiles = _TILES[_family(device)][block_m]
    touched = _touched_experts(shape, tokens)
    gate_up_n = _balanced_columns(tiles[_G], shape.inter, touched, device, block_m)
    down_n = _balanced_columns(tiles[_D], shape.hidden, touched, device, block_m)
    return _plan(shape, device, block_m, gate_up_n, down_n)


def _block_m(shape: MoEShape, tokens: int) -> int:
    rows = tokens * shape.top_k / (shape.experts or shape.local_experts)
    return next((block_m for most, block_m in _ROWS if rows <= most), _LARGEST_BLOCK_M)


def _touched_experts(shape: MoEShape, tokens: int) -> int:
    """Return how many local experts ``tokens`` tokens are expected to reach under uniform routing."""
    experts = shape.experts or shape.local_experts
    share = 1.0 - (1.0 - shape.top_k / experts) ** max(tokens, 1)
    return max(1, round(shape.local_experts * share))


def _balanced_columns(tile: _Tile, columns: int, touched: int, device: DeviceInfo, block_m: int) -> int:
    """Return the widest tile whose tiles fill their waves over the SMs, as long as few waves make that matter."""
    widest = tile.block_n
    while widest > _SMALLEST and widest // 2 >= columns:
        widest //= 2
    narrowest = max(32, 8 * tile.num_warps)  # 8 columns are the least that a warp multiplies
    if block_m > 32 or widest <= narrowest:
        return widest
    choices = [width for width in (256, 128, 64, 32) if narrowest <= width <= widest]
    filled = {width: _filled(touched * -(-columns // width), device.sm_count) for width in choices}
    return next(width for width in choices if filled[width] >= _NEARLY * max(filled.values()))


def _filled(tiles: int, sm_count: int) -> float:
    """Return the part of the SMs' time that ``tiles`` equal tiles fill."""
    waves = -(-tiles // sm_count)
    return 1.0 if waves > _ENOUGH_WAVES else tiles / (waves * sm_count)


def _family(device: DeviceInfo) -> _Family:
    if device.is_amd:
        return _Family.CDNA
    if device.sm >= 90 and device.smem_limit >= 200_000:
        return _Family.HOPPER
    return _Family.AMPERE if device.smem_limit >= 150_000 else _Family.SMALL_SMEM


@lru_cache(maxsize=1024)
def _plan(shape: MoEShape, device: DeviceInfo, block_m: int, gate_up_n: int, down_n: int) -> LayerPlan:
    """Build a plan once per tile choice: a lookup without a table must cost microseconds."""
    tiles = _TILES[_family(device)][block_m]
    gate_up = tiles[_G]._replace(block_n=gate_up_n)
    down = tiles[_D]._replace(block_n=down_n)
    return LayerPlan(
        gate_up=_fitting(gate_up, block_m, device, shape, _G), down=_fitting(down, block_m, device, shape, _D)
    )


def _fitting(tile: _Tile, block_m: int, device: DeviceInfo, shape: MoEShape, role: Role) -> MoEKernelConfig:
    """Return the first config, from the wanted one downwards, that ``why_not`` lets run."""
    reason = None
    for config in _descent(tile, block_m, device, shape, role):
        reason = config.why_not(device, shape, role)
        if reason is None:
            return config
    raise UnsupportedConfigError(f"no default plan for {shape.key} on {device.name}: {reason}")


def _descent(tile: _Tile, block_m: int, device: DeviceInfo, shape: MoEShape, role: Role) -> Iterator[MoEKernelConfig]:
    """Yield ever smaller configs: TMA where it pays, then gather, fewer stages first, then less depth, then columns."""
    inner = shape.hidden if role is _G else shape.inter
    config = MoEKernelConfig(
        structure=Structure.TMA,
        block_m=block_m,
        block_n=tile.block_n,
        block_k=min(tile.block_k, max(_SMALLEST, 1 << (inner - 1).bit_length())),
        num_warps=_useful_warps(tile.num_warps, block_m, tile.block_n),
        prefetch_distance=tile.stages,
        group_m=8 if block_m >= 64 else 1,
        warp_size=device.warp_size,
    )
    if block_m >= 64 and _family(device) is _Family.HOPPER:
        yield from (replace(config, prefetch_distance=stages) for stages in range(tile.stages, 1, -1))
        if block_m == _LARGEST_BLOCK_M:  # without TMA the addresses take the registers of half the columns
            config = replace(config, block_n=max(_SMALLEST, config.block_n // 2))
    config = replace(config, structure=Structure.GATHER)
    if inner % 8:  # rows off the 16-byte grid pass through registers: 64 deep spilled 32 of 255 on sm_80
        config = replace(config, block_k=min(config.block_k, 32))
    yield config
    while (smaller := _smaller(config)) is not None:
        config = smaller
        yield config


def _useful_warps(num_warps: int, block_m: int, block_n: int) -> int:
    """Return at most as many warps as the tile has pieces of 16 rows and 8 columns, the least a warp multiplies."""
    return min(num_warps, (block_m // 16) * (block_n // 8))


def _smaller(config: MoEKernelConfig) -> MoEKernelConfig | None:
    if config.prefetch_distance > 2:
        return replace(config, prefetch_distance=config.prefetch_distance - 1)
    if config.block_k > 32:
        return replace(config, block_k=config.block_k // 2)
    if config.block_n > _SMALLEST:
        return replace(config, block_n=config.block_n // 2)
    if config.prefetch_distance > 1:
        return replace(config, prefetch_distance=1)
    return replace(config, block_k=_SMALLEST) if config.block_k > _SMALLEST else None
