"""Read hardware counters of whole layers: one worker process per metric set, all jobs in it.

A profiler takes one list of metrics per run, and a list that needs two passes makes it save and restore the memory around
every kernel (tens of GB of weights). So each single-pass set gets a run of its own; the second one finds Triton's cache
warm. A sweep asks for HEADLINE alone: one run.

Numbers are cold (the caches are flushed before each kernel) at the clocks of the moment (they are left alone). The
profiler's durations are kept apart from CUDA-event times: the two differ by 0.5 to 2 us.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import Any

from moetune.measure.counter_names import MetricSet, chip_of, metrics, only_own_units
from moetune.measure.counter_ways import NCU
from moetune.measure.counters_run import Counted, CountersRun, CounterWay
from moetune.measure.ncu_csv import LaunchRow
from moetune.measure.parts import Part
from moetune.models.routing import UNIFORM, Routing, routing_from_json, routing_to_json
from moetune.outcome import Failed, FailureKind
from moetune_kernels.device import DeviceInfo, device_info
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape, WeightFormat

PROFILE_SETS = (MetricSet.MAIN, MetricSet.TENSOR)
SWEEP_SETS = (MetricSet.HEADLINE,)
TIME_LIMIT_S = 240.0  # of one run; a worker that starts cold compiles a handful of kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterJob:
    """One layer to look at: every kernel of ``plan`` at ``tokens`` tokens.

    ``resident_experts`` is how many different experts' weights are held when memory is short (expert e reads the
    weights of ``e % resident_experts``); None holds them all. ``routing`` is how the tokens choose experts.
    """

    shape: MoEShape
    tokens: int
    plan: LayerPlan
    resident_experts: int | None = None
    routing: Routing = UNIFORM

    def to_json(self) -> dict[str, Any]:
        """Return the job as plain JSON values, the model's expert count included."""
        return {
            "shape": self.shape.to_json(),
            "experts": self.shape.experts,
            "tokens": self.tokens,
            "plan": self.plan.to_json(),
            "resident_experts": self.resident_experts,
            "routing": routing_to_json(self.routing),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CounterJob:
        """Parse what :meth:`to_json` wrote."""
        return cls(
            shape=replace(MoEShape.from_json(value["shape"]), experts=value["experts"]),
            tokens=value["tokens"],
            plan=LayerPlan.from_json(value["plan"]),
            resident_experts=value["resident_experts"],
            routing=routing_from_json(value["routing"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCounters:
    """What the counters said of one launch; None where a set was not read or the chip does not say.

    Percentages are of the peak: issue slots and warps while an SM is active (``issue_elapsed_percent``, DRAM and the
    tensor pipe: over the whole kernel).
    """

    part: Part
    kernel: str
    passes: int | None = None
    duration_ns: float | None = None
    cycles_active: float | None = None
    cycles_elapsed: float | None = None
    sm_clock_hz: float | None = None
    issue_active_percent: float | None = None
    issue_elapsed_percent: float | None = None
    instructions: float | None = None
    instructions_issued: float | None = None
    occupancy_percent: float | None = None
    eligible_warps: float | None = None
    dram_read_bytes: float | None = None
    dram_write_bytes: float | None = None
    dram_percent: float | None = None
    dram_bytes_per_cycle: float | None = None
    dram_clock_hz: float | None = None
    l2_bytes: float | None = None
    bank_conflicts: float | None = None
    tensor_percent: float | None = None
    wgmma_flops: float | None = None
    mma_flops: float | None = None
    registers: float | None = None
    grid_size: float | None = None
    block_size: float | None = None
    waves_per_sm: float | None = None

    @property
    def dram_bytes(self) -> float | None:
        """Bytes read from and written to DRAM."""
        if self.dram_read_bytes is None or self.dram_write_bytes is None:
            return None
        return self.dram_read_bytes + self.dram_write_bytes

    @property
    def tensor_flops(self) -> float | None:
        """FLOPs of all tensor instructions, padding included."""
        counted = [value for value in (self.wgmma_flops, self.mma_flops) if value is not None]
        return sum(counted) if counted else None

    @property
    def dram_peak_bytes_per_s(self) -> float | None:
        """The DRAM's peak at the clock that it ran at."""
        if self.dram_bytes_per_cycle is None or self.dram_clock_hz is None:
            return None
        return self.dram_bytes_per_cycle * self.dram_clock_hz

    def to_json(self) -> dict[str, Any]:
        """Return the fields that have a value."""
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"part": self.part.value}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What one run is to read: who counts, field -> metric, and the GPU."""

    way: CounterWay
    names: Mapping[str, str]
    device: DeviceInfo

    def run(self) -> CountersRun:
        """Return a run of it that is not started yet. Raises OSError: no folder can be made."""
        return CountersRun(self.way, self.names, self.device)

    def is_of(self, run: CountersRun | None) -> bool:
        """Whether ``run`` reads just this."""
        return run is not None and run.way is self.way and run.names == self.names


@dataclass(frozen=True, slots=True)
class Reader:
    """Who counts, and a run that was started before: the set that it reads is read by it if it still lives.

    That run is closed by who started it.
    """

    way: CounterWay
    ahead: CountersRun | None = None


CountersOfJob = list[KernelCounters] | Failed
CountersByJob = dict[CounterJob, CountersOfJob]


def counters_unavailable() -> str | None:
    """Say in one sentence why ncu cannot read hardware counters here, or None when nothing known forbids it.

    :func:`moetune.measure.ncu.blocked` also gives the lines that would change it.
    """
    found = NCU.blocked(None)
    return None if found is None else found.reason


def read_counters(
    jobs: Sequence[CounterJob],
    *,
    by: Reader = Reader(NCU),
    device: DeviceInfo | None = None,
    device_index: int = 0,
    sets: Sequence[MetricSet] = PROFILE_SETS,
    time_limit_s: float = TIME_LIMIT_S,
) -> CountersByJob:
    """Run every kernel of every job once per metric set, after a warm-up, and return what was counted.

    The worker makes its own weights: free what this process holds first. A set that cannot be read leaves its fields
    None; a job without any set is Failed, with one sentence.

    Args:
        jobs: what to look at; jobs of one shape share weights, so keep them together.
        by: who counts.
        device: the GPU, where the caller knows it; torch is asked, and starts CUDA here, when None.
        device_index: the CUDA device, as torch counts it here.
        sets: which metric sets to read, one run each.
        time_limit_s: wall-clock limit of each run.
    """
    if not jobs:
        return {}
    if len({job.shape.format for job in jobs}) > 1:
        raise ValueError("jobs of one call must share a weight format: each format has counters of its own")
    found = by.way.blocked(device)
    if found is not None:
        return _all_failed(jobs, Failed(FailureKind.RESOURCES, found.reason))
    device = device or device_info(device_index)
    if chip_of(device.sm) is None:
        reason = f"no counter names are known for {device.name} (compute capability {device.sm / 10:.1f})"
        return _all_failed(jobs, Failed(FailureKind.RESOURCES, reason))
    request = {"device_index": device_index, "jobs": [job.to_json() for job in jobs]}
    results: list[CountersByJob] = []
    for chosen in sets:
        plan = RunPlan(by.way, by.way.readable(set_metrics(jobs[0].shape.format, chosen, device)), device)
        read = _read(request, plan, time_limit_s, by.ahead)
        results.append(_all_failed(jobs, read) if isinstance(read, Failed) else assign(jobs, read, plan.names))
    return {job: _merge([result[job] for result in results]) for job in jobs}


def set_metrics(weights: WeightFormat, chosen: MetricSet, device: DeviceInfo) -> dict[str, str]:
    """Return field -> metric for one set; each weight format has counters of its own."""
    chip = chip_of(device.sm)
    assert chip is not None
    names = metrics(chip, weights, chosen)
    return names if device.mig is None else only_own_units(names)


def _read(
    request: Mapping[str, Any], plan: RunPlan, time_limit_s: float, ahead: CountersRun | None
) -> Counted | Failed:
    """Read one set by the run that was started ahead, or by a new one where that is of no use."""
    deadline = time.monotonic() + time_limit_s
    try:
        if ahead is not None and plan.is_of(ahead):
            ahead.tell(request)
            read = ahead.finish(time_limit_s)
            if isinstance(read, Failed) or read.taken:  # else it ended before its jobs came
                return read
        with closing(plan.run()) as run:
            run.tell(request)
            left_s = max(deadline - time.monotonic(), 0.0)
            run.start(left_s)
            return run.finish(left_s)
    except OSError as error:
        return Failed(FailureKind.LAUNCH, f"{plan.way.title} could not be started: {error.strerror}")


def assign(jobs: Sequence[CounterJob], counted: Counted, names: Mapping[str, str]) -> CountersByJob:
    """Give each counted row to the launch that the worker noted, in order and by kernel name.

    Args:
        jobs: the jobs in the order in which the worker took them.
        counted: what the run left.
        names: field -> metric of the set.
    """
    rows = iter(counted.rows)
    found: dict[int, list[KernelCounters]] = {index: [] for index in range(len(jobs))}
    ended: dict[int, str | None] = {}
    for note in counted.launches:
        index = note["job"]
        if "kernel" not in note:
            ended[index] = note.get("failed")
            continue
        row = next((row for row in rows if row.kernel == note["kernel"]), None)
        found[index] += [] if row is None else [_counters(note, row, names)]
    out: CountersByJob = {}
    for index, job in enumerate(jobs):
        launched = sum(note["job"] == index and "kernel" in note for note in counted.launches)
        if ended.get(index) is not None:
            out[job] = Failed(FailureKind.RESOURCES, str(ended[index]))
        elif index in ended and len(found[index]) == launched > 0:
            out[job] = found[index]
        elif found[index]:
            listed = f"{counted.title} listed {len(found[index])} of {launched} launches"
            reason = listed if index in ended else f"{listed}; {counted.lack.reason}"
            out[job] = Failed(FailureKind.LAUNCH, reason)
        else:
            out[job] = counted.lack
    return out


def _counters(note: Mapping[str, Any], row: LaunchRow, names: Mapping[str, str]) -> KernelCounters:
    values = {field: row.values[metric] for field, metric in names.items() if metric in row.values}
    return KernelCounters(part=Part(note["part"]), kernel=row.kernel, passes=row.passes, **values)


def _merge(outcomes: Sequence[CountersOfJob]) -> CountersOfJob:
    """Join the sets of one job launch by launch; where both know a field, the first set's value stands."""
    read = [outcome for outcome in outcomes if not isinstance(outcome, Failed)]
    if not read:
        return next(outcome for outcome in outcomes if isinstance(outcome, Failed))
    merged = read[0]
    for other in read[1:]:
        if [launch.kernel for launch in other] == [launch.kernel for launch in merged]:
            merged = [_join(one, two) for one, two in zip(merged, other, strict=True)]
    return merged


def _join(one: KernelCounters, two: KernelCounters) -> KernelCounters:
    values = {field.name: getattr(one, field.name) for field in fields(one)}
    missing = {name: getattr(two, name) for name, value in values.items() if value is None}
    return KernelCounters(**(values | missing))


def _all_failed(jobs: Sequence[CounterJob], failed: Failed) -> CountersByJob:
    return dict.fromkeys(jobs, failed)
