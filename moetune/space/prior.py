"""A guess at which configs are fast, from tiles, waves and bytes alone: it orders the space, it never decides.

The unit is arbitrary (the time of one FLOP on one multiprocessor). Memory-bound sizes are flat, compute-bound ones are
needles that tiles and waves find at once, so the guess only has to rank tiles that differ a lot.

The rates are rounded from a fit to two recorded H200 layers each, checked on the third: the fits agreed, and every
third layer was ranked better than before (reports/2026-12-01-search-on-recordings.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

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
MMA_SYNC_RATE = 0.8  # of wgmma's rate: mma.sync is what tiles under 64 rows or 4 warps get on sm_90
# A tile of m x n outputs reads 1/m + 1/n operands per FLOP. Up to 1/64 the tensor cores bind, beyond it the operands'
# way into shared memory.
OPERANDS_PER_FLOP = 1 / 64
LOWEST_TILE = 16  # rows
STAGE_RATE = {1: 0.5, 2: 0.78}  # of the rate with three stages or more
DEPTH_RATE = {16: 0.6, 32: 0.92, 64: 1.0, 128: 0.92, 256: 0.84}
STRUCTURE_RATE = {Structure.GATHER: 0.87, Structure.TMA: 0.95, Structure.TMA_PERMUTE: 1.0}


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
    tiles = load.row_tiles(config.block_m) * ceil(problem.columns / config.block_n)
    blocks = blocks_per_sm(config, problem)
    slots = problem.device.sm_count * blocks
    waves = max(ceil(tiles / slots), 1)
    steps = ceil(problem.depth / config.block_k)
    tile_flops = 2 * config.block_m * config.block_n * problem.matrices * steps * config.block_k
    # A last wave that fills only some multiprocessors still lasts as long as its tiles.
    busiest = min(waves * blocks, ceil(tiles / problem.device.sm_count) + blocks - 1)
    compute = busiest * tile_flops / _tensor_rate(config, problem)
    memory = _memory_time(config, problem, load, tiles)
    longer, shorter = max(compute, memory), min(compute, memory)
    return longer * (1.0 + (shorter / longer) ** OVERLAP) ** (1.0 / OVERLAP) + _copy_time(config, problem, load)


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
    return (
        rate
        * STAGE_RATE.get(config.prefetch_distance, 1.0)
        * DEPTH_RATE[config.block_k]
        * STRUCTURE_RATE[config.structure]
    )


def _memory_time(config: MoEKernelConfig, problem: Problem, load: ExpertLoad, tiles: float) -> float:
    """Return the time that the weights (and the rows) take to arrive, in FLOPs of one multiprocessor."""
    weights = load.touched * problem.matrices * problem.columns * problem.depth * ACTIVATION_BYTES
    row_tiles = max(load.row_tiles(config.block_m) / load.touched, 1.0)
    passes = max(row_tiles / config.group_m, 1.0)
    rows = load.touched * load.rows * problem.depth * ACTIVATION_BYTES
    stage = problem.matrices * config.block_n * config.block_k * ACTIVATION_BYTES
    depth = min(config.prefetch_distance, ceil(problem.depth / config.block_k))
    resident = min(float(blocks_per_sm(config, problem)), max(tiles / problem.device.sm_count, 0.05))
    reached = min(1.0, resident * (depth - USED_STAGES) * stage / IN_FLIGHT_BYTES) ** STARVED
    tall = 1.0 + HEIGHT_COST * log2(config.block_m / LOWEST_TILE)
    return (weights * passes**0.5 + rows) * tall * FLOPS_PER_BYTE / problem.device.sm_count / reached


def _copy_time(config: MoEKernelConfig, problem: Problem, load: ExpertLoad) -> float:
    """Return the time of the launch before the GEMM that reads all rows and writes them in expert order."""
    if config.structure is not Structure.TMA_PERMUTE:
        return 0.0
    copied = 2 * load.touched * load.rows * problem.depth * ACTIVATION_BYTES
    return copied * FLOPS_PER_BYTE / problem.device.sm_count
