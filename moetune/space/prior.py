"""A guess at which configs are fast, from tiles, waves and bytes alone: it orders the space, it never decides.

The unit is arbitrary (the time of one FLOP on one multiprocessor). Memory-bound sizes are flat, compute-bound ones are
needles that tiles and waves find at once, so the guess only has to rank tiles that differ a lot.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from moetune.space.load import ExpertLoad
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import ACTIVATION_BYTES, MoEShape

FLOPS_PER_BYTE = 190.0  # dense bf16 FLOP/s over bytes/s that an H200 reaches: 8.0e14 over 4.2e12
REGISTERS_PER_SM = 65_536
REGISTERS_BESIDE_ACCUMULATORS = 64  # addresses, masks and operands of a thread (sm_90, gather kernel)
MAX_BLOCKS_PER_SM = 8
IN_FLIGHT_BYTES = 65_536  # weight bytes under way per multiprocessor that keep an H200's memory busy
MMA_SYNC_RATE = 0.55  # of wgmma's rate: mma.sync is what tiles under 64 rows or 4 warps get on sm_90
# A tile of m x n outputs reads 1/m + 1/n operands per FLOP. Up to 1/70 the tensor cores bind, beyond it the operands'
# way into shared memory: at 16384 tokens on an H200 64x64 took 2.1 times the time of 128x128, 64x128 1.3 to 1.5 times,
# 64x256 1.07 times, and 128x256 was no faster.
OPERANDS_PER_FLOP = 1 / 70
STAGE_RATE = {1: 0.5, 2: 0.8, 3: 0.95}  # of the rate with four stages or more
DEPTH_RATE = {16: 0.6, 32: 0.85, 64: 1.0, 128: 0.98, 256: 0.9}
STRUCTURE_RATE = {Structure.GATHER: 0.88, Structure.TMA: 0.96, Structure.TMA_PERMUTE: 1.0}


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
    return max(compute, _memory_time(config, problem, load, tiles)) + 0.02 * compute + _copy_time(config, problem, load)


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
    rate = min(1.0, OPERANDS_PER_FLOP / operands) / (1.0 + 2.0 / config.block_m + 2.0 / width)
    if problem.device.sm >= 90 and (config.block_m < 64 or config.num_warps < 4):
        rate *= MMA_SYNC_RATE
    if config.num_warps == 8 and config.block_m * width < 128 * 128:
        rate *= 0.9  # two warpgroups on a small tile wait for each other more than they work
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
    reached = min(1.0, resident * depth * stage / IN_FLIGHT_BYTES) ** 0.5
    return (weights * passes**0.5 + rows) * FLOPS_PER_BYTE / problem.device.sm_count / reached


def _copy_time(config: MoEKernelConfig, problem: Problem, load: ExpertLoad) -> float:
    """Return the time of the launch before the GEMM that reads all rows and writes them in expert order."""
    if config.structure is not Structure.TMA_PERMUTE:
        return 0.0
    copied = 2 * load.touched * load.rows * problem.depth * ACTIVATION_BYTES
    return copied * FLOPS_PER_BYTE / problem.device.sm_count
