"""What can be said of a kernel without running it: least work, tiles, waves, padding, instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moetune.measure.parts import Part
from moetune.models.roofline import (
    Work,
    combine_work,
    executed_rows,
    expected_executed_rows,
    expected_slots,
    expected_touched_experts,
    kernel_work,
    routing_work,
    steps,
)
from moetune.outcome import Compiled
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import ACTIVATION_BYTES, MoEShape

SCHEDULERS_PER_SM = 4
SM_REGISTERS = 65_536
REGISTER_GRANULE = 8  # registers per thread are handed out in eights
SM_SMEM_EXTRA = 1024  # an SM holds this much more than one block may opt in to, and reserves it per block
MAX_BLOCKS_PER_SM = 32
ROLES = {Part.GATE_UP: Role.GATE_UP, Part.DOWN: Role.DOWN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How tokens fall on this rank's experts: real counts where a router has spoken, else the mean of uniform routing."""

    shape: MoEShape
    tokens: int
    slots: float
    touched: float
    counts: tuple[int, ...] | None = None

    @classmethod
    def expected(cls, shape: MoEShape, tokens: int) -> Load:
        """Return the mean load under uniform routing."""
        touched = expected_touched_experts(shape, tokens)
        return cls(shape=shape, tokens=tokens, slots=expected_slots(shape, tokens), touched=touched)

    @classmethod
    def real(cls, shape: MoEShape, tokens: int, counts: Sequence[int]) -> Load:
        """Return the load of ``counts`` slots per local expert."""
        touched = float(sum(count > 0 for count in counts))
        return cls(shape=shape, tokens=tokens, slots=float(sum(counts)), touched=touched, counts=tuple(counts))

    def rows(self, block_m: int) -> float:
        """Return the rows that tiles of ``block_m`` multiply, padding included."""
        if self.counts is not None:
            return float(executed_rows(self.counts, block_m))
        return expected_executed_rows(self.shape, self.tokens, block_m)

    def padding(self, block_m: int) -> float:
        """Return rows multiplied per real row; 1 where there is none."""
        return self.rows(block_m) / self.slots if self.slots else 1.0


def part_work(load: Load, part: Part) -> Work:
    """Return the least work of one part."""
    if part in ROLES:
        return kernel_work(load.shape, load.tokens, ROLES[part], touched_experts=load.touched, slots=load.slots)
    if part is Part.ROUTING:
        return routing_work(load.shape, load.tokens)
    if part is Part.COMBINE:
        return combine_work(load.shape, load.tokens)
    rows = (load.tokens + load.slots) * load.shape.hidden  # x read once, one row written per slot
    return Work(flops=0.0, weight_bytes=0.0, activation_bytes=rows * ACTIVATION_BYTES, touched_experts=0.0)


def parts_of(plan: LayerPlan) -> tuple[Part, ...]:
    """Return the parts that a layer of this plan launches, in order."""
    copies = plan.gate_up.structure is Structure.TMA_PERMUTE
    return tuple(part for part in Part if part is not Part.COPY or copies)


def tile_count(load: Load, config: MoEKernelConfig, role: Role) -> float:
    """Return the output tiles of one grouped GEMM."""
    columns = load.shape.inter if role is Role.GATE_UP else load.shape.hidden
    return load.rows(config.block_m) / config.block_m * -(-columns // config.block_n) * config.split_k


def blocks_per_sm(device: DeviceInfo, compiled: Compiled) -> int:
    """Return how many blocks of a compiled kernel one SM holds: by threads, registers and shared memory."""
    threads = 1536 if device.sm in (86, 87, 89, 120) else 2048
    registers = -(-compiled.registers // REGISTER_GRANULE) * REGISTER_GRANULE * compiled.block_size
    smem = compiled.smem_bytes + SM_SMEM_EXTRA
    fitting = (
        threads // compiled.block_size,
        SM_REGISTERS // max(registers, 1),
        (device.smem_limit + SM_SMEM_EXTRA) // smem,
        MAX_BLOCKS_PER_SM,
    )
    return max(min(fitting), 1)


def blocks_per_sm_by_smem(device: DeviceInfo, config: MoEKernelConfig, shape: MoEShape, role: Role) -> int:
    """Return :func:`blocks_per_sm` guessed before compiling: from the tiles' shared memory and the threads alone."""
    smem = config.smem_estimate(device.sm, shape, role) + SM_SMEM_EXTRA
    by_threads = 2048 // (2 * config.block_size)  # half the register file leaves 64 registers per thread
    return max(min((device.smem_limit + SM_SMEM_EXTRA) // smem, by_threads, MAX_BLOCKS_PER_SM), 1)


def instructions(load: Load, config: MoEKernelConfig, role: Role, compiled: Compiled) -> float | None:
    """Return the warp instructions of one launch, counted in the compiled code; None where it has no counted loop.

    A persistent kernel runs its fixed part once per program instead of once per tile, so this is a little high for it.
    """
    if compiled.loop_instructions is None or compiled.fixed_instructions is None:
        return None
    per_warp = compiled.fixed_instructions + compiled.loop_instructions * steps(config, load.shape, role)
    return tile_count(load, config, role) * config.num_warps * per_warp


def issue_share(instruction_count: float, device: DeviceInfo, clock_hz: float, time_us: float) -> float:
    """Return which share of all issue slots ``instruction_count`` takes in ``time_us``."""
    slots = SCHEDULERS_PER_SM * device.sm_count * clock_hz * time_us * 1e-6
    return instruction_count / slots
