"""The words that all layers of the tuner share: a trial, how it ended, and a figure with its source."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any, TypeVar, cast

from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.plan import LayerPlan

TIME_DIGITS = 3  # of a stored round in microseconds; CUDA events tell no less
POWER_CAP = "power cap"
SLOW_CLOCK_SHARE = 0.75  # NVBench discards samples below this share of the nominal clock
_LOW, _HIGH = 0.2, 0.8


class Source(Enum):
    """Where a figure comes from."""

    COUNTER = "counter"  # hardware counters, read by CUPTI or ncu
    EVENT = "event"  # CUDA events
    STATIC = "static"  # instructions read from the compiled kernel, over a measured time
    ANALYTICAL = "analytical"  # formula over the shape (and a measured time)
    COMPOSED = "composed"  # sum or mean over parts that were measured apart
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its source; ``value`` is None exactly when the source is unavailable, and ``reason`` says why."""

    value: float | None
    source: Source
    reason: str | None = None

    def __post_init__(self) -> None:
        if (self.value is None) != (self.source is Source.UNAVAILABLE):
            raise ValueError(f"a figure without a value is unavailable and the other way round, got {self}")
        if self.value is None and not self.reason:
            raise ValueError("an unavailable figure needs a reason")

    @classmethod
    def unavailable(cls, reason: str) -> Figure:
        """Return a figure that no honest estimate exists for."""
        return cls(None, Source.UNAVAILABLE, reason)

    def to_json(self) -> dict[str, Any]:
        """Return ``{value, source}``, with ``reason`` where there is one."""
        out: dict[str, Any] = {"value": self.value, "source": self.source.value}
        return out if self.reason is None else out | {"reason": self.reason}

    @classmethod
    def from_json(cls, value: Any) -> Figure:
        """Parse what :meth:`to_json` wrote; raises ValueError on anything else."""
        names = set(cast("dict[str, Any]", value)) if isinstance(value, dict) else set[str]()
        if not {"value", "source"} <= names <= {"value", "source", "reason"}:
            raise ValueError(f"a figure must be {{value, source}}, got {value!r}")
        known = cast("dict[str, Any]", value)
        return cls(known["value"], Source(known["source"]), known.get("reason"))


@dataclass(frozen=True, slots=True)
class Sample:
    """Median of repeated times, and half the range between their 20th and 80th percentile; microseconds."""

    median_us: float
    spread_us: float
    count: int


def summarize(times_us: Sequence[float]) -> Sample:
    """Summarise at least one time.

    >>> summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    Sample(median_us=3.0, spread_us=10.6, count=5)
    """
    ordered = sorted(times_us)
    half_range = (_quantile(ordered, _HIGH) - _quantile(ordered, _LOW)) / 2
    return Sample(round(statistics.median(ordered), 4), round(half_range, 4), len(ordered))


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler reports of one kernel: registers per thread, spilled registers, bytes, threads per block.

    The instruction counts are per warp, read from the SASS: outside the main loop, and in one turn of it; None where
    the code has no single counted main loop.
    """

    registers: int
    spills: int
    smem_bytes: int
    block_size: int
    fixed_instructions: int | None = None
    loop_instructions: int | None = None
    tensor_instruction: str | None = None  # HGMMA, HMMA, UTCHMMA, …


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSpan:
    """A GPU's clocks, heat and power while something was timed, lowest and highest; None where the driver is silent.

    Args:
        sm_mhz, memory_mhz: clocks.
        sm_max_mhz: the SM clock that the card is made for.
        temperature_c, power_w: degrees Celsius and watts.
        throttle: why the clock was held down, in words; empty when it was not.
    """

    sm_mhz: tuple[int, int] | None = None
    sm_max_mhz: int | None = None
    memory_mhz: tuple[int, int] | None = None
    temperature_c: tuple[int, int] | None = None
    power_w: tuple[float, float] | None = None
    throttle: tuple[str, ...] | None = None

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """The reasons that are no normal state of the card; a large one under full load is always at its power cap."""
        return tuple(reason for reason in self.throttle or () if reason != POWER_CAP)

    @property
    def warning(self) -> str | None:
        """One sentence when times taken meanwhile are not to be trusted, or are those of a card far below its clock."""
        if self.slowdowns:
            return (
                f"the GPU was held down while it was timed ({', '.join(self.slowdowns)}); let it cool, then sweep again"
            )
        low = None if self.sm_mhz is None else self.sm_mhz[0]
        if low is not None and self.sm_max_mhz and low < SLOW_CLOCK_SHARE * self.sm_max_mhz:
            why = f" ({', '.join(self.throttle)})" if self.throttle else ""
            return f"the SM clock fell to {low} MHz of {self.sm_max_mhz} MHz{why}; such times hold for that state alone"
        return None

    def over(self, other: ClockSpan) -> ClockSpan:
        """Return the span over both."""
        reasons = (
            None if self.throttle is None and other.throttle is None else (self.throttle or ()) + (other.throttle or ())
        )
        return ClockSpan(
            sm_mhz=_both(self.sm_mhz, other.sm_mhz),
            sm_max_mhz=self.sm_max_mhz or other.sm_max_mhz,
            memory_mhz=_both(self.memory_mhz, other.memory_mhz),
            temperature_c=_both(self.temperature_c, other.temperature_c),
            power_w=_both(self.power_w, other.power_w),
            throttle=None if reasons is None else tuple(dict.fromkeys(reasons)),
        )


Value = TypeVar("Value", int, float)


def _both(one: tuple[Value, Value] | None, other: tuple[Value, Value] | None) -> tuple[Value, Value] | None:
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])


def over_all(spans: Iterable[ClockSpan | None]) -> ClockSpan | None:
    """Return the span over all that are known; None when none is.

    >>> over_all([ClockSpan(sm_mhz=(1980, 1980)), None, ClockSpan(sm_mhz=(1500, 1800))]).sm_mhz
    (1500, 1980)
    """
    known = [span for span in spans if span is not None]
    return reduce(ClockSpan.over, known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A trial that ran: time in microseconds (median, and half the 20th to 80th percentile range) and its figures.

    ``times_us`` are its times in the order of the rounds, where plans were timed against each other in rounds; empty
    where each was timed alone. ``clocks`` are the GPU's meanwhile, where they were read.
    """

    median_us: float
    spread_us: float
    samples: int
    flops_per_byte: Figure
    bandwidth_gbps: Figure
    issue_efficiency: Figure
    source: Source = Source.EVENT
    times_us: tuple[float, ...] = ()
    clocks: ClockSpan | None = None


class FailureKind(Enum):
    """Why a trial has no time."""

    COMPILE = "compile"  # the compiler refused or crashed
    TIMEOUT = "timeout"
    RESOURCES = "resources"  # shared memory, registers or device memory
    LAUNCH = "launch"  # the kernel faulted
    WRONG = "wrong"  # its output does not match the reference
    SLOW = "slow"  # out of the race in its first launch
    UNRECORDED = "unrecorded"  # replay has no such trial


@dataclass(frozen=True, slots=True)
class Failed:
    """A trial that ended without a time."""

    kind: FailureKind
    reason: str


Outcome = Measured | Failed


class Subject(Enum):
    """What a trial times."""

    GATE_UP = "gate_up"
    DOWN = "down"
    ROUTING = "routing"  # route and permute at one block_m; the config is the plan's, only block_m counts
    COMBINE = "combine"
    LAYER = "layer"


class Stage(Enum):
    """How far a trial got: raced with few samples, or timed in the paired final that decides the table."""

    SCREEN = "screen"
    FINAL = "final"


EVERY_COUNT = 0  # token count of trials that ended at compile
SUBJECT_OF = {Role.GATE_UP: Subject.GATE_UP, Role.DOWN: Subject.DOWN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One attempt and its end.

    ``choice`` is a kernel config for GATE_UP and DOWN, a plan for LAYER, and the block_m for ROUTING and COMBINE.
    """

    subject: Subject
    tokens: int
    choice: MoEKernelConfig | LayerPlan | int
    stage: Stage
    outcome: Outcome
    compiled: Compiled | None = None
    verified: bool = False
