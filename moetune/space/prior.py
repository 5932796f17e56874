"""A guess at which configs are fast, from tiles, waves and bytes alone: it orders the space, it never decides.

The unit is arbitrary (the time of one FLOP on one multiprocessor). Memory-bound sizes are flat, compute-bound ones are
needles that tiles and waves find at once, so the guess only has to rank tiles that differ a lot.

The rates are rounded from a fit to two recorded H200 layers each, checked on the third: the fits agreed, and every
third layer was ranked better than before (reports/2026-12-01-search-on-recordings.md). What several blocks of one
multiprocessor do for each other, and what row tiles that share weights cost, was added afterwards and checked on an
exhaustive recording (reports/2026-12-01-search-regret.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

from moetune.space.load import ExpertLoad
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import ACTIVATION_BYTES, MoEShape

FLOPS_PER_BYTE = 190.0  # dense bf16 FLOP/s over bytes/s that an H200 reaches: 8.0e14 over 4.2e12
REGISTERS_PER_SM = 65_536
REGISTERS_BESIDE_ACCUMULATORS = 64  # addresses, masks and operands of a thread (sm_90, gather kernel)
MAX_BLOCKS_PER_SM = 8
# Compute and memory overlap, but not wholly: the longer of the two rules, and the other shows through. That is what
# tells tiles apart where all of them wait for memory.
OVERLAP = 3.0
IN_FLIGHT_BYTES = 100_000  # weight bytes under way per multiprocessor that keep an H200's memory busy
STARVED = 0.25  # exponent: half of these bytes under way cost a sixth of the bandwidth
USED_STAGES = 0.5  # of a prefetch distance: on average so much of the stage being multiplied is not under way
HEIGHT_COST = 0.0125  # memory time per doubling of a tile's height over 16 rows: rows that are masked are still fetched
# Exponent of how often the row tiles of an expert read its weights: after the first time they mostly come from L2.
# Passes over the columns that group_m leaves count once more.
REREAD = 0.15
MMA_SYNC_RATE = 0.8  # of wgmma's rate: mma.sync is what tiles under 64 rows or 4 warps get on sm_90
# A tile of m x n outputs reads 1/m + 1/n operands per FLOP. Up to 1/64 the tensor cores bind, beyond it the operands'
# way into shared memory.
OPERANDS_PER_FLOP = 1 / 64
LOWEST_TILE = 16  # rows
# Of the rate with three stages or more, in a multiprocessor's only block: another block multiplies while this one waits.
# At 4096 tokens two stages took 33 and 48% longer than three (down, gate-up: medians, H200) where no block more fitted
# for them, and -9 to 6% where one did.
STAGE_RATE = {1: 0.5, 2: 0.73}
EMPTY_STEPS = 0.7  # before and after its products a tile takes so many steps' time; other blocks multiply meanwhile
DEPTH_RATE = {16: 0.6, 32: 0.92, 64: 1.0, 128: 0.92, 256: 0.84}
STRUCTURE_RATE = {Structure.GATHER: 0.87, Structure.TMA: 0.95, Structure.TMA_PERMUTE: 1.0}

Values = Any  # a number, or an array with one per config


@dataclass(frozen=True, slots=True)
class Problem:
    """One grouped GEMM as the guess sees it: output columns, inner depth, weight matrices that share the rows."""

    shape: MoEShape
    device: DeviceInfo
    role: Role

    @property
    def columns(self) -> int:
        """Output columns of one weight matrix."""
        return self.shape.inter if self.role is Role.GATE_UP else self.shape.hidden

    @property
    def depth(self) -> int:
        """Length of the inner dimension."""
        return self.shape.hidden if self.role is Role.GATE_UP else self.shape.inter

    @property
    def matrices(self) -> int:
        """Weight matrices that one tile multiplies: gate and up, or down."""
        return 2 if self.role is Role.GATE_UP else 1


def predict(config: MoEKernelConfig, problem: Problem, tokens: int) -> float:
    """Return the guessed time of one kernel at ``tokens`` tokens, in arbitrary units; lower is better."""
    load = ExpertLoad.of(problem.shape, tokens)
    return time_of(Tile.of(config, problem), load.row_tiles(config.block_m), load, problem, FLOATS)


@dataclass(frozen=True, slots=True)
class Tile:
    """What the guess takes from a config whatever the token count: numbers, or arrays with one of each per config.

    Args:
        across: tiles side by side over the columns.
        blocks: blocks that one multiprocessor holds.
        flops: of one tile.
        rate: the share of the tensor cores' rate that a multiprocessor full of such tiles reaches.
        fed: the share of that rate which the stages of a lone block keep up.
        steps: of a tile along the inner dimension.
        group_m: row tiles that share one pass over the columns.
        under_way: stages of a block that are under way on average.
        stage: weight bytes of one stage.
        tall: the memory time of its height over that of the lowest tile.
        is_copied: 1 where a launch before the GEMM copies the rows into expert order, else 0.
    """

    across: Values
    blocks: Values
    flops: Values
    rate: Values
    fed: Values
    steps: Values
    group_m: Values
    under_way: Values
    stage: Values
    tall: Values
    is_copied: Values

    @classmethod
    def of(cls, config: MoEKernelConfig, problem: Problem) -> Tile:
        """Return the numbers of one config."""
        steps = ceil(problem.depth / config.block_k)
        return cls(
            across=ceil(problem.columns / config.block_n),
            blocks=blocks_per_sm(config, problem),
            flops=2 * config.block_m * config.block_n * problem.matrices * steps * config.block_k,
            rate=_tensor_rate(config, problem),
            fed=STAGE_RATE.get(config.prefetch_distance, 1.0),
            steps=steps,
            group_m=config.group_m,
            under_way=min(config.prefetch_distance, steps) - USED_STAGES,
            stage=problem.matrices * config.block_n * config.block_k * ACTIVATION_BYTES,
            tall=1.0 + HEIGHT_COST * log2(config.block_m / LOWEST_TILE),
            is_copied=int(config.structure is Structure.TMA_PERMUTE),
        )


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What the formula asks of numbers beside ``+ - * /``: on floats, or on arrays element by element."""

    most: Callable[[Values, Values], Values]
    least: Callable[[Values, Values], Values]
    ceil: Callable[[Values], Values]
    power: Callable[[Values, float], Values]


FLOATS = Arithmetic(max, min, ceil, pow)


def time_of(tile: Tile, row_tiles: Values, load: ExpertLoad, problem: Problem, of: Arithmetic) -> Values:
    """Return the guess for one tile, or for every one of the arrays."""
    sm_count = problem.device.sm_count
    tiles = row_tiles * tile.across
    waves = of.most(of.ceil(tiles / (sm_count * tile.blocks)), 1)
    # A last wave that fills only some multiprocessors still lasts as long as its tiles.
    busiest = of.least(waves * tile.blocks, of.ceil(tiles / sm_count) + tile.blocks - 1)
    # Blocks of one multiprocessor cover each other's waits.
    beside = of.least(1.0 * tile.blocks, of.most(tiles / sm_count, 1.0))
    rate = tile.rate * (1.0 - (1.0 - tile.fed) / (beside * beside))
    compute = busiest * tile.flops / rate * (1.0 + EMPTY_STEPS / (tile.steps * beside))
    memory = _memory_time(tile, (row_tiles, tiles), load, problem, of)
    longer, shorter = of.most(compute, memory), of.least(compute, memory)
    overlapped = longer * of.power(1.0 + of.power(shorter / longer, OVERLAP), 1.0 / OVERLAP)
    return overlapped + _copy_time(load, problem) * tile.is_copied


def _memory_time(
    tile: Tile, counts: tuple[Values, Values], load: ExpertLoad, problem: Problem, of: Arithmetic
) -> Values:
    """Return the time that the weights (and the rows) take to arrive, in FLOPs of one multiprocessor.

    Args:
        tile: the tile.
        counts: row tiles, and tiles.
        load: of the token count.
        problem: the GEMM.
        of: what it is made of.
    """
    row_tiles, tiles = counts
    sm_count = problem.device.sm_count
    weights = load.touched * problem.matrices * problem.columns * problem.depth * ACTIVATION_BYTES
    row_tiles_each = of.most(row_tiles / load.touched, 1.0)
    reads = row_tiles_each * of.most(row_tiles_each / tile.group_m, 1.0)
    rows = load.touched * load.rows * problem.depth * ACTIVATION_BYTES
    resident = of.least(1.0 * tile.blocks, of.most(tiles / sm_count, 0.05))
    reached = of.power(of.least(1.0, resident * tile.under_way * tile.stage / IN_FLIGHT_BYTES), STARVED)
    return (weights * of.power(reads, REREAD) + rows) * tile.tall * FLOPS_PER_BYTE / sm_count / reached


def blocks_per_sm(config: MoEKernelConfig, problem: Problem) -> int:
    """Return how many blocks one multiprocessor holds, by shared memory and by a guess at registers."""
    smem = max(config.smem_estimate(problem.device.sm, problem.shape, problem.role), 1)
    accumulators = problem.matrices * config.block_m * config.block_n // config.block_size
    registers = min(accumulators + REGISTERS_BESIDE_ACCUMULATORS, config.max_registers or 255) * config.block_size
    by_registers = max(REGISTERS_PER_SM // registers, 1)
    return max(1, min(problem.device.smem_limit // smem, by_registers, MAX_BLOCKS_PER_SM))


def _tensor_rate(config: MoEKernelConfig, problem: Problem) -> float:
    """Return the share of the tensor cores' rate that a multiprocessor full of such tiles reaches."""
    width = problem.matrices * config.block_n
    operands = 1.0 / max(config.block_m, 64) + 1.0 / width  # lower tiles do not get far enough to be held up by it
    rate = min(1.0, OPERANDS_PER_FLOP / operands) / (1.0 + 2.0 / width)
    if problem.device.sm >= 90 and (config.block_m < 64 or config.num_warps < 4):
        rate *= MMA_SYNC_RATE
    return rate * DEPTH_RATE[config.block_k] * STRUCTURE_RATE[config.structure]


def _copy_time(load: ExpertLoad, problem: Problem) -> float:
    """Return the time of the launch before the GEMM that reads all rows and writes them in expert order."""
    copied = 2 * load.touched * load.rows * problem.depth * ACTIVATION_BYTES
    return copied * FLOPS_PER_BYTE / problem.device.sm_count
