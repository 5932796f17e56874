"""The three figures of a trial (FLOPs per byte, bandwidth, issue efficiency), each with its source. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.engine.backend import LayerFigures
from moetune.models.roofline import Work, steps, tiles
from moetune.outcome import Compiled, Figure, Measured, Source, summarize
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.shape import MoEShape

if TYPE_CHECKING:
    from moetune.measure.counters import KernelCounters
    from moetune.measure.timer import Sample

ISSUE_SLOTS_PER_SM = 4  # schedulers, each of which issues one instruction per cycle at most
NO_LOOP = "the compiled code has no single counted main loop"
TOO_MANY = "the instructions read from the code exceed the issue slots of the measured time, so the count is wrong"
NO_CLOCK = "NVML gives no SM clock here, and the device's boost clock is not listed"


@dataclass(frozen=True, slots=True)
class IssueRate:
    """What turns instructions and microseconds into a share of the issue slots: SMs and their clock in Hz."""

    sm_count: int
    clock_hz: float | None

    def efficiency(self, warp_instructions: float | None, time_us: float, reason: str | None = None) -> Figure:
        """Return the static estimate of issued instructions over issue slots, or unavailable with the reason."""
        if warp_instructions is None:
            return Figure.unavailable(reason or NO_LOOP)
        if self.clock_hz is None:
            return Figure.unavailable(NO_CLOCK)
        slots = ISSUE_SLOTS_PER_SM * self.sm_count * self.clock_hz * time_us * 1e-6
        if warp_instructions > slots:
            return Figure.unavailable(TOO_MANY)
        return Figure(warp_instructions / slots, Source.STATIC, reason)


def warp_instructions(
    compiled: Compiled | None, config: MoEKernelConfig, shape: MoEShape, role: Role, counts: Sequence[int]
) -> float | None:
    """Return the instructions that all warps of one launch issue, read from the SASS; None where it cannot be counted.

    Args:
        compiled: what the compiler reported.
        config: the launch choice.
        shape: the layer.
        role: which GEMM.
        counts: slots of each local expert.
    """
    if compiled is None or compiled.fixed_instructions is None or compiled.loop_instructions is None:
        return None
    per_tile = compiled.fixed_instructions + compiled.loop_instructions * steps(config, shape, role)
    return float(per_tile * tiles(config, shape, role, counts) * config.num_warps)


def measured(sample: Sample, work: Work, issue: Figure) -> Measured:
    """Return a timed trial: density by formula, bandwidth as minimal bytes over time (a lower bound)."""
    return Measured(
        median_us=sample.median_us,
        spread_us=sample.spread_us,
        samples=sample.count,
        flops_per_byte=Figure(work.flops_per_byte, Source.ANALYTICAL),
        bandwidth_gbps=Figure(work.bytes_min / sample.median_us * 1e-3, Source.ANALYTICAL),
        issue_efficiency=issue,
    )


def timed_only(times_us: list[float]) -> Measured:
    """Return a time that is only compared: its figures would be another routing's than the entry's."""
    none = Figure.unavailable("timed only to be compared")
    sample = summarize(times_us)
    return Measured(
        median_us=sample.median_us,
        spread_us=sample.spread_us,
        samples=sample.count,
        flops_per_byte=none,
        bandwidth_gbps=none,
        issue_efficiency=none,
    )


def counted(launches: Sequence[KernelCounters], work: Work) -> LayerFigures:
    """Return a layer's figures from the counters of all its launches.

    Bytes and time are both the profiler's, so that their ratio is of one run. FLOPs are the useful ones: a tile's padding
    would make a layer that wastes work look denser.
    """
    return LayerFigures(
        flops_per_byte=_counted_density(launches, work),
        bandwidth_gbps=_counted_bandwidth(launches),
        issue_efficiency=_counted_issue(launches),
    )


def _counted_bytes(launches: Sequence[KernelCounters]) -> float | None:
    values = [launch.dram_bytes for launch in launches]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _counted_density(launches: Sequence[KernelCounters], work: Work) -> Figure:
    total = _counted_bytes(launches)
    if not total:
        return Figure.unavailable("this chip counts no DRAM bytes for us")
    return Figure(work.flops / total, Source.COUNTER, "bytes counted; FLOPs by formula, padding not counted as work")


def _counted_bandwidth(launches: Sequence[KernelCounters]) -> Figure:
    total, times = _counted_bytes(launches), [launch.duration_ns for launch in launches]
    known = [value for value in times if value is not None]
    if total is None or len(known) != len(times) or not sum(known):
        return Figure.unavailable("this chip counts no DRAM bytes for us")
    return Figure(total / sum(known), Source.COUNTER)  # bytes per nanosecond are GB/s


def _counted_issue(launches: Sequence[KernelCounters]) -> Figure:
    known = [
        (launch.issue_active_percent, launch.cycles_active)
        for launch in launches
        if launch.issue_active_percent is not None and launch.cycles_active
    ]
    cycles = sum(weight for _, weight in known)
    if not cycles:
        return Figure.unavailable("this chip counts no issue slots for us")
    return Figure(sum(percent * weight for percent, weight in known) / cycles / 100, Source.COUNTER)
