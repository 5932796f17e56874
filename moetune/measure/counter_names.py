"""Which hardware counters to ask for on which chip, so that every set needs one pass over a kernel.

One pass means no replay: nothing is saved and restored around a launch, and kernels that write in place are safe. The
names differ from chip to chip; ``tests/profiling/test_counter_names.py`` asks CUPTI whether each exists and whether
each set still schedules in one pass. Notes that cost time to find out:

- FLOPs come from the ``sm__ops_path_tensor`` counters, whose unit is the FLOP (a multiply-add is two). Tensor
  *instructions* say nothing: one HGMMA is anything from 16,384 to 524,288 FLOP.
- On Hopper a tile under 64 rows, or of fewer than 4 warps, multiplies by HMMA (mma.sync), a larger one by HGMMA.
- No composite ``throughput`` beside DRAM's: ``sm__throughput`` alone takes nine passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from moetune_kernels.shape import WeightFormat


class MetricSet(Enum):
    """What one launch of a kernel can tell. ``moetune profile`` takes MAIN and TENSOR, a sweep takes HEADLINE."""

    MAIN = "main"  # time, bytes, issue slots, cycles, occupancy, L2, bank conflicts; warpgroup FLOPs where they fit
    TENSOR = "tensor"  # tensor-pipe activity, all tensor FLOPs, cycles
    HEADLINE = "headline"  # the three figures of a table: bytes, issue slots, FLOPs


class Chip(Enum):
    """NVIDIA's name of the die, as CUPTI knows it."""

    GA100 = "GA100"
    GA102 = "GA102"
    AD102 = "AD102"
    GH100 = "GH100"
    GB100 = "GB100"
    GB202 = "GB202"


_CHIPS = {80: Chip.GA100, 86: Chip.GA102, 89: Chip.AD102, 90: Chip.GH100, 100: Chip.GB100, 120: Chip.GB202}

_TIME = {
    "duration_ns": "gpu__time_duration.sum",
    "cycles_active": "sm__cycles_active.avg",
    "cycles_elapsed": "sm__cycles_elapsed.max",
}
_ISSUE = {"issue_active_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active"}
_MAIN = _ISSUE | {
    "issue_elapsed_percent": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    "sm_clock_hz": "sm__cycles_elapsed.avg.per_second",
    "instructions": "smsp__inst_executed.sum",
    "instructions_issued": "smsp__inst_issued.sum",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "eligible_warps": "smsp__warps_eligible.avg.per_cycle_active",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes_per_cycle": "dram__bytes.sum.peak_sustained",
    "dram_clock_hz": "dram__cycles_elapsed.avg.per_second",
    "l2_bytes": "lts__t_bytes.sum",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
}
# Facts of the launch, not counters: they cost no pass and are in no chip's list.
LAUNCH = {
    "registers": "launch__registers_per_thread",
    "grid_size": "launch__grid_size",
    "block_size": "launch__block_size",
    "waves_per_sm": "launch__waves_per_multiprocessor",
}

_DRAM = {"dram_read_bytes": "dram__bytes_read.sum", "dram_write_bytes": "dram__bytes_write.sum"}
_DRAM_GB202 = {"dram_read_bytes": "dram__bytes_op_read.sum", "dram_write_bytes": "dram__bytes_op_write.sum"}

_TENSOR_PIPE = {
    Chip.GA100: "sm__pipe_tensor_cycles_active",
    Chip.GA102: "sm__pipe_tensor_cycles_active",
    Chip.AD102: "sm__pipe_tensor_cycles_active_v2",  # the name without _v2 is deprecated there
    Chip.GH100: "sm__pipe_tensor_cycles_active",
    Chip.GB100: "sm__pipe_tensor_cycles_active",
    Chip.GB202: "sm__pipe_tensor_cycles_active",
}

# Operand types that a tensor instruction reads. Weight-only formats are converted to bf16 before they are multiplied.
_OPERAND = {
    WeightFormat.FP16: "fp16",
    WeightFormat.FP8: "fp8",
    WeightFormat.FP8_CHANNEL: "fp8",
    WeightFormat.FP8_BLOCK: "fp8",
}

# (chip, operand) -> (asynchronous warpgroup or tcgen05 instructions, mma.sync); "" where the chip has no such counter.
_FLOPS: Mapping[tuple[Chip, str], tuple[str, str]] = {
    (Chip.GA100, "bf16"): ("", "src_bf16_dst_fp32"),
    (Chip.GA100, "fp16"): ("", "src_fp16_dst_fp32"),
    (Chip.GA102, "bf16"): ("", "src_bf16_dst_fp32"),
    (Chip.GA102, "fp16"): ("", "src_fp16_dst_fp32"),
    (Chip.AD102, "bf16"): ("", "src_bf16_dst_fp32"),
    (Chip.AD102, "fp16"): ("", "src_fp16_dst_fp32"),
    (Chip.AD102, "fp8"): ("", "src_fp8"),
    (Chip.GH100, "bf16"): ("op_hgmma_src_bf16_dst_fp32", "op_hmma_src_bf16_dst_fp32"),
    (Chip.GH100, "fp16"): ("op_hgmma_src_fp16", "op_hmma_src_fp16_dst_fp32"),
    (Chip.GH100, "fp8"): ("src_fp8", ""),  # QGMMA has no counter of its own: fp8 is counted by source type
    (Chip.GB100, "bf16"): ("op_utchmma_src_bf16_dst_fp32", "op_hmma_src_bf16_dst_fp32"),
    (Chip.GB100, "fp16"): ("op_utchmma_src_fp16_dst_fp32", "op_hmma_src_fp16_dst_fp32"),
    (Chip.GB100, "fp8"): ("op_utcqmma_src_fp4_fp6_fp8_dst_fp32", ""),
    (Chip.GB202, "bf16"): ("", "op_hmma_src_bf16_dst_fp32"),
    (Chip.GB202, "fp16"): ("", "op_hmma_src_fp16_dst_fp32"),
    (Chip.GB202, "fp8"): ("", "src_fp8_dst_fp32"),
}

# Where the FLOP counter would take the set a second pass: the set goes without it.
_CROWDED: Mapping[MetricSet, frozenset[tuple[Chip, str]]] = {
    MetricSet.MAIN: frozenset({(Chip.GB100, "fp8")}),
    MetricSet.HEADLINE: frozenset({(Chip.GB202, "fp8")}),
}


def chip_of(sm: int) -> Chip | None:
    """Return the chip of compute capability ``sm`` (90 for 9.0), or None where no names are known."""
    return _CHIPS.get(sm)


def metrics(chip: Chip, weights: WeightFormat, chosen: MetricSet) -> dict[str, str]:
    """Return field name -> metric name of one set, the launch facts included."""
    dram = _DRAM_GB202 if chip is Chip.GB202 else _DRAM
    flops = _flops(chip, weights)
    if chosen is MetricSet.TENSOR:
        pipe = {"tensor_percent": f"{_TENSOR_PIPE[chip]}.avg.pct_of_peak_sustained_elapsed"}
        return _TIME | pipe | flops | LAUNCH
    if (chip, _operand(chip, weights)) in _CROWDED[chosen]:
        flops = {}
    if chosen is MetricSet.HEADLINE:
        return _TIME | _ISSUE | dram | flops | LAUNCH
    fitting = {name: metric for name, metric in flops.items() if name == "wgmma_flops"}
    return _TIME | _MAIN | dram | fitting | LAUNCH


def only_own_units(names: Mapping[str, str]) -> dict[str, str]:
    """Drop the counters of units that MIG slices share (DRAM and L2), which a slice may not read."""
    return {name: metric for name, metric in names.items() if not metric.startswith(("dram__", "lts__"))}


def _flops(chip: Chip, weights: WeightFormat) -> dict[str, str]:
    wgmma, mma = _FLOPS[chip, _operand(chip, weights)]
    names = {"wgmma_flops": wgmma, "mma_flops": mma}
    return {name: f"sm__ops_path_tensor_{middle}_sparsity_off.sum" for name, middle in names.items() if middle}


def _operand(chip: Chip, weights: WeightFormat) -> str:
    operand = _OPERAND.get(weights, "bf16")
    return operand if (chip, operand) in _FLOPS else "bf16"  # no fp8 unit: weights are converted first
