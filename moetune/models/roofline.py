"""What a layer must do at least: FLOPs, bytes, touched experts, padded rows, and the time that no kernel can beat.

Torch-free. Letters as everywhere: T tokens, K experts per token, E local experts, H hidden, I intermediate per rank.
Expected values assume uniform routing; pass real counts where a router has spoken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import ACTIVATION_BYTES, MoEShape, WeightFormat

# Bytes of scales per weight: one bf16 per 128, one e8m0 byte per 32, one float32 per 128 x 128 block.
_SCALE_BYTES_PER_WEIGHT = {
    WeightFormat.INT4: 2 / 128,
    WeightFormat.MXFP4: 1 / 32,
    WeightFormat.FP8_BLOCK: 4 / (128 * 128),
}
_PMF_SIGMAS = 9.0  # the binomial's tail beyond nine deviations is under 1e-18


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The least that must be done: multiply-adds counted as two FLOPs, every byte crossing DRAM once.

    Args:
        flops: floating point operations on real (not padded) rows.
        weight_bytes: bytes of the touched experts' weights, scales included.
        activation_bytes: bytes of rows read and written.
        touched_experts: experts that own at least one slot; a fraction when it is an expectation.
    """

    flops: float
    weight_bytes: float
    activation_bytes: float
    touched_experts: float

    @property
    def bytes_min(self) -> float:
        """Bytes that must cross DRAM at least once."""
        return self.weight_bytes + self.activation_bytes

    @property
    def flops_per_byte(self) -> float:
        """Compute density: FLOPs per byte of minimal traffic; 0 when there is no traffic."""
        return self.flops / self.bytes_min if self.bytes_min else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What a data sheet promises: bytes per second, dense bf16 FLOP/s and the boost clock of the SMs in Hz."""

    bytes_per_s: float
    flops: float
    sm_clock_hz: float
    source: str


class Limit(Enum):
    """Which ceiling the bound comes from."""

    MEMORY = "memory"
    COMPUTE = "compute"


def expected_touched_experts(shape: MoEShape, tokens: int) -> float:
    """Return how many local experts own at least one slot on average: ``E * (1 - (1 - K / E_total) ** T)``.

    >>> expected_touched_experts(MoEShape(hidden=64, inter=64, local_experts=8, top_k=2), 1)
    2.0
    """
    return shape.local_experts * (1.0 - (1.0 - shape.top_k / total_experts(shape)) ** tokens)


def total_experts(shape: MoEShape) -> int:
    """Return the model's expert count over all ranks."""
    return shape.experts if shape.experts is not None else shape.local_experts


def expected_slots(shape: MoEShape, tokens: int) -> float:
    """Return the slots that this rank computes on average: all ``T * K`` without expert parallelism."""
    return tokens * shape.top_k * shape.local_experts / total_experts(shape)


def executed_rows(counts: Sequence[int], block_m: int) -> int:
    """Return the rows that tiles of ``block_m`` multiply for experts with ``counts`` slots each, padding included."""
    return sum(-(-count // block_m) * block_m for count in counts)


def expected_executed_rows(shape: MoEShape, tokens: int, block_m: int) -> float:
    """Return :func:`executed_rows` on average over uniform routing, where an expert's count is binomial."""
    share = shape.top_k / total_experts(shape)
    return shape.local_experts * block_m * _expected_blocks(tokens, share, block_m)


def _expected_blocks(trials: int, share: float, block: int) -> float:
    """Return the mean of ``ceil(n / block)`` for ``n ~ Binomial(trials, share)``."""
    if share >= 1.0 or trials == 0:
        return float(-(-trials // block))
    mean, deviation = trials * share, math.sqrt(trials * share * (1.0 - share))
    low = max(0, math.floor(mean - _PMF_SIGMAS * deviation - 1))
    high = min(trials, math.ceil(mean + _PMF_SIGMAS * deviation + 20))
    choose = math.lgamma(trials + 1)
    total = 0.0
    for n in range(max(low, 1), high + 1):
        log_choose = choose - math.lgamma(n + 1) - math.lgamma(trials - n + 1)
        total += math.exp(log_choose + n * math.log(share) + (trials - n) * math.log1p(-share)) * -(-n // block)
    return total


def weight_bytes(shape: MoEShape, weights: float) -> float:
    """Return the bytes of ``weights`` expert weights in the shape's format, scales included."""
    per_weight = shape.format.bytes_per_weight + _SCALE_BYTES_PER_WEIGHT.get(shape.format, 0.0)
    return weights * per_weight


def layer_work(
    shape: MoEShape, tokens: int, *, touched_experts: float | None = None, slots: float | None = None
) -> Work:
    """Return the least work of a whole layer, rows in to rows out; h and y are not counted, as a fused layer needs none.

    Args:
        shape: the layer.
        tokens: T.
        touched_experts: experts that own a slot; the expectation when None.
        slots: slots that local experts compute; the expectation when None.
    """
    touched = expected_touched_experts(shape, tokens) if touched_experts is None else touched_experts
    slots = expected_slots(shape, tokens) if slots is None else slots
    return Work(
        flops=6.0 * slots * shape.hidden * shape.inter,
        weight_bytes=weight_bytes(shape, touched * 3 * shape.hidden * shape.inter),
        activation_bytes=2.0 * tokens * shape.hidden * ACTIVATION_BYTES,
        touched_experts=touched,
    )


def kernel_work(
    shape: MoEShape, tokens: int, role: Role, *, touched_experts: float | None = None, slots: float | None = None
) -> Work:
    """Return the least work of one grouped GEMM: x to h for gate-up, h to y (one row per slot) for down.

    Arguments as in :func:`layer_work`.
    """
    touched = expected_touched_experts(shape, tokens) if touched_experts is None else touched_experts
    slots = expected_slots(shape, tokens) if slots is None else slots
    matrices = 2 if role is Role.GATE_UP else 1
    rows_in = tokens * shape.hidden if role is Role.GATE_UP else slots * shape.inter
    rows_out = slots * (shape.inter if role is Role.GATE_UP else shape.hidden)
    return Work(
        flops=2.0 * matrices * slots * shape.hidden * shape.inter,
        weight_bytes=weight_bytes(shape, touched * matrices * shape.hidden * shape.inter),
        activation_bytes=(rows_in + rows_out) * ACTIVATION_BYTES,
        touched_experts=touched,
    )


def routing_work(shape: MoEShape, tokens: int) -> Work:
    """Return the least work of route and permute: logits read, weights, ids and slot order written."""
    slots = tokens * shape.top_k
    traffic = tokens * total_experts(shape) * ACTIVATION_BYTES + slots * (4 + 4 + 4)
    return Work(flops=0.0, weight_bytes=0.0, activation_bytes=traffic, touched_experts=0.0)


def combine_work(shape: MoEShape, tokens: int) -> Work:
    """Return the least work of combine: K rows of y read and one row written per token, one add per element."""
    slots = expected_slots(shape, tokens)
    traffic = (slots + tokens) * shape.hidden * ACTIVATION_BYTES
    return Work(flops=slots * shape.hidden, weight_bytes=0.0, activation_bytes=traffic, touched_experts=0.0)


def bound_us(work: Work, bytes_per_s: float, flops: float) -> float:
    """Return the physical bound in microseconds: the slower of moving the bytes and doing the FLOPs."""
    return max(work.bytes_min / bytes_per_s, work.flops / flops) * 1e6


def limit(work: Work, bytes_per_s: float, flops: float) -> Limit:
    """Return which of the two ceilings sets :func:`bound_us`."""
    return Limit.MEMORY if work.bytes_min / bytes_per_s >= work.flops / flops else Limit.COMPUTE


def tiles(config: MoEKernelConfig, shape: MoEShape, role: Role, counts: Sequence[int]) -> int:
    """Return the output tiles that one launch computes when experts own ``counts`` slots each."""
    columns = shape.inter if role is Role.GATE_UP else shape.hidden
    row_blocks = executed_rows(counts, config.block_m) // config.block_m
    return row_blocks * -(-columns // config.block_n) * config.split_k


def steps(config: MoEKernelConfig, shape: MoEShape, role: Role) -> int:
    """Return the turns of ``block_k`` that one tile takes along its inner dimension."""
    inner = shape.hidden if role is Role.GATE_UP else shape.inter
    return -(-inner // (config.block_k * config.split_k))


# Dense bf16 with float32 accumulation, without 2:4 sparsity; DRAM bandwidth; boost clock. All per data sheet.
NOMINAL: dict[str, Peaks] = {
    "NVIDIA A100-SXM4-80GB": Peaks(
        bytes_per_s=2.039e12, flops=312e12, sm_clock_hz=1.41e9, source="NVIDIA A100 data sheet (SXM, 80 GB)"
    ),
    "NVIDIA A100-SXM4-40GB": Peaks(
        bytes_per_s=1.555e12, flops=312e12, sm_clock_hz=1.41e9, source="NVIDIA A100 data sheet (SXM, 40 GB)"
    ),
    "NVIDIA A100 80GB PCIe": Peaks(
        bytes_per_s=1.935e12, flops=312e12, sm_clock_hz=1.41e9, source="NVIDIA A100 data sheet (PCIe, 80 GB)"
    ),
    "NVIDIA A10": Peaks(bytes_per_s=0.6e12, flops=125e12, sm_clock_hz=1.695e9, source="NVIDIA A10 data sheet"),
    "NVIDIA L40S": Peaks(bytes_per_s=0.864e12, flops=362e12, sm_clock_hz=2.52e9, source="NVIDIA L40S data sheet"),
    "NVIDIA H100 80GB HBM3": Peaks(
        bytes_per_s=3.35e12, flops=989e12, sm_clock_hz=1.98e9, source="NVIDIA H100 data sheet (SXM)"
    ),
    "NVIDIA H100 PCIe": Peaks(
        bytes_per_s=2.0e12, flops=756e12, sm_clock_hz=1.755e9, source="NVIDIA H100 data sheet (PCIe)"
    ),
    "NVIDIA H100 NVL": Peaks(
        bytes_per_s=3.9e12, flops=835e12, sm_clock_hz=1.785e9, source="NVIDIA H100 data sheet (NVL)"
    ),
    "NVIDIA H200": Peaks(bytes_per_s=4.8e12, flops=989e12, sm_clock_hz=1.98e9, source="NVIDIA H200 data sheet (SXM)"),
    "NVIDIA H20": Peaks(bytes_per_s=4.0e12, flops=148e12, sm_clock_hz=1.98e9, source="NVIDIA H20 product brief"),
    "NVIDIA B200": Peaks(bytes_per_s=8.0e12, flops=2250e12, sm_clock_hz=1.965e9, source="NVIDIA B200 data sheet"),
    "NVIDIA GeForce RTX 5090": Peaks(
        bytes_per_s=1.792e12, flops=209.5e12, sm_clock_hz=2.407e9, source="NVIDIA RTX Blackwell white paper"
    ),
    "AMD Instinct MI300X": Peaks(
        bytes_per_s=5.3e12, flops=1307.4e12, sm_clock_hz=2.1e9, source="AMD Instinct MI300X data sheet"
    ),
}


def nominal_peaks(device: DeviceInfo) -> Peaks | None:
    """Return the data sheet's peaks of a whole device, or None for one that is not listed or is a MIG slice."""
    return None if device.mig is not None else NOMINAL.get(device.name)
