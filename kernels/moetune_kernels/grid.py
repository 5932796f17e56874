"""How many programs a persistent kernel gets. Plain arithmetic; on the ``meta`` device any number will do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import TARGETS, DeviceInfo, device_info
from moetune_kernels.shape import MoEShape

if TYPE_CHECKING:
    import torch

SM_SMEM_EXTRA = 1024  # what the driver reserves per block on top of its shared memory
SM_THREADS = 2048
MAX_PROGRAMS_PER_SM = 8


def device_of(tensor: torch.Tensor) -> DeviceInfo:
    """Return the device that a tensor lives on; an H200 stands in for tensors that are only compiled with."""
    if tensor.device.type != "cuda":
        return TARGETS["sm_90"]
    return device_info(tensor.device.index)


def persistent_programs(config: MoEKernelConfig, device: DeviceInfo, shape: MoEShape, role: Role) -> int:
    """Return the programs that fit the device at once, judged by shared memory and threads."""
    smem = config.smem_estimate(device.sm, shape, role) + SM_SMEM_EXTRA
    by_smem = (device.smem_limit + SM_SMEM_EXTRA) // smem
    by_threads = SM_THREADS // (2 * config.block_size)  # 2: half the register file leaves 64 registers per thread
    return device.sm_count * max(1, min(by_smem, by_threads, MAX_PROGRAMS_PER_SM))
