"""What the device reaches today: a large copy and a large matmul, cold, by CUDA events."""

from __future__ import annotations

import torch

from moetune.engine.backend import Ceilings
from moetune.measure.timer import Timer

COPY_BYTES = 4 << 30  # far over any L2
MATMUL_SIZE = 8192
SAMPLES = 12


def measure_ceilings(timer: Timer, device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure bytes per second (read and written) of a copy, and FLOP/s of a square matmul in ``dtype``."""
    return Ceilings(bytes_per_s=_copy_bytes_per_s(timer, device), flops=_matmul_flops(timer, device, dtype))


def _copy_bytes_per_s(timer: Timer, device: torch.device) -> float:
    free, _ = torch.cuda.mem_get_info(device)
    source = torch.zeros(min(COPY_BYTES, free // 4), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = timer.sample(lambda: target.copy_(source), SAMPLES)
    return 2 * source.numel() / copied.median_us * 1e6


def _matmul_flops(timer: Timer, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn((MATMUL_SIZE, MATMUL_SIZE), dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(a)
    multiplied = timer.sample(lambda: torch.mm(a, b, out=product), SAMPLES)
    return 2 * MATMUL_SIZE**3 / multiplied.median_us * 1e6
