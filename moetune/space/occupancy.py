"""Where one more block fits on a multiprocessor: the shared-memory ceilings and the register caps worth a name."""

from __future__ import annotations

from functools import lru_cache

from moetune.space.prior import MAX_BLOCKS_PER_SM, REGISTERS_PER_SM
from moetune_kernels.device import DeviceInfo

RESERVED_SMEM = 1024  # bytes that CUDA keeps per block; a multiprocessor has so much more than one block may take
REGISTER_UNIT = 8  # registers per thread are handed out in eights
MOST_REGISTERS = 255  # of one thread: a cap of so many is none
FEWEST_REGISTERS = 24  # the lowest cap that a config may name
# Caps that change the code whether or not they bind. ptxas takes a cap for a target: with 128, gather 16x64 of 4 warps
# went from 72 registers to 89 and from 100% to 97.4% of its time; with 168, tma 64x256 of 8 warps from 236 to 168
# registers and to 94.5%. 19 of the 108 kernels in the three H200 tables carry one of these two.
STEADY_CAPS = (168, 128)


@lru_cache(maxsize=64)
def smem_ceilings(device: DeviceInfo) -> tuple[int, ...]:
    """Return the most bytes per block at which 1, 2, 3… blocks fit on a multiprocessor, the largest first.

    >>> from moetune_kernels.device import TARGETS
    >>> smem_ceilings(TARGETS["sm_90"])[:4]
    (232448, 115712, 76800, 57344)
    """
    reserved = 0 if device.is_amd else RESERVED_SMEM
    total = device.smem_limit + reserved
    return tuple(total // blocks - reserved for blocks in range(1, MAX_BLOCKS_PER_SM + 1))


def smem_ceiling(smem_bytes: int, device: DeviceInfo) -> int:
    """Return the lowest ceiling that a kernel of ``smem_bytes`` keeps to; the device's own where it keeps to none."""
    return min((ceiling for ceiling in smem_ceilings(device) if smem_bytes <= ceiling), default=device.smem_limit)


def blocks_by_smem(smem_bytes: int, device: DeviceInfo) -> int:
    """Return how many blocks of ``smem_bytes`` one multiprocessor holds, at most eight."""
    return sum(smem_bytes <= ceiling for ceiling in smem_ceilings(device))


@lru_cache(maxsize=64)
def register_caps(block_size: int) -> tuple[int, ...]:
    """Return the caps worth a compile for blocks of ``block_size`` threads, the highest first.

    These are the registers per thread at which 2, 3, 4… blocks fill the register file, and the steady ones.

    >>> register_caps(128), register_caps(256)
    ((168, 128, 96, 80, 72, 64), (168, 128, 80, 64, 48, 40, 32))
    """
    steps = {REGISTERS_PER_SM // (blocks * block_size) for blocks in range(2, MAX_BLOCKS_PER_SM + 1)}
    whole = {step // REGISTER_UNIT * REGISTER_UNIT for step in steps} | set(STEADY_CAPS)
    return tuple(sorted((cap for cap in whole if FEWEST_REGISTERS <= cap < MOST_REGISTERS), reverse=True))


def blocks_by_registers(registers: int, block_size: int) -> int:
    """Return how many blocks the register file holds, at most eight and at least one."""
    rounded = -(-registers // REGISTER_UNIT) * REGISTER_UNIT
    return max(1, min(REGISTERS_PER_SM // (rounded * block_size), MAX_BLOCKS_PER_SM))
