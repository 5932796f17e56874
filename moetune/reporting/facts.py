"""What a page shows of one tuned table: plain values, ready to draw.

Charts and the page read only these types, so that neither knows how tables and trials are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moetune.models.roofline import Limit
from moetune.outcome import Compiled, Figure, Source, Trial
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape
from moetune_kernels.table import UNIFORM

BOUND_SHARE = 0.8  # at or above this share of a ceiling a kernel is bound by it (ncu's speed-of-light rule)
LATENCY_SHARE = 0.6  # under this share of both ceilings neither explains the time (the same rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """Two ceilings: bytes per second to and from DRAM, and dense FLOP/s."""

    bytes_per_s: float
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One token count of a table. Times in microseconds; ``flops`` and ``bytes`` are the least that its routing allows."""

    tokens: int
    serves: tuple[int, int]
    plan: LayerPlan
    median_us: float
    spread_us: float
    baseline_us: float | None
    bound_us: float | None
    flops: float
    bytes: float
    limit: Limit | None  # None where no ceiling is known
    flops_per_byte: Figure
    bandwidth_gbps: Figure
    issue_efficiency: Figure

    @property
    def speedup(self) -> float | None:
        """How many times faster than the default plan."""
        return None if self.baseline_us is None else self.baseline_us / self.median_us

    @property
    def bound_share(self) -> float | None:
        """The physical bound over the time: 1.0 is as fast as the device can be."""
        return None if self.bound_us is None else self.bound_us / self.median_us

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s."""
        return self.flops / self.median_us * 1e-6

    @property
    def intensity(self) -> float:
        """Analytical FLOPs per byte: each touched weight, input and output moved once."""
        return self.flops / self.bytes

    @property
    def counted(self) -> tuple[float, float] | None:
        """FLOPs per byte and useful TFLOP/s of the launches whose bytes counters saw, or None where none did.

        They are other launches than the timed ones, of other random rows, so their speed is taken from them too.
        """
        intensity, gbps = self.flops_per_byte, self.bandwidth_gbps
        if intensity.source is not Source.COUNTER or gbps.source is not Source.COUNTER:
            return None
        return (intensity.value, intensity.value * gbps.value * 1e-3) if intensity.value and gbps.value else None

    def verdict(self) -> str:
        """Say in a few words what holds this token count back."""
        share = self.bound_share
        if share is None or self.limit is None:
            return "no bound known"
        if share >= BOUND_SHARE:
            return f"{self.limit.value} bound"
        if share >= LATENCY_SHARE:
            return f"mostly {self.limit.value} bound"
        return "neither ceiling: latency, tails, small kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSet:
    """Trials of one device and shape, and where they were found."""

    trials: tuple[Trial, ...]
    origin: str

    def compiled(self) -> Mapping[tuple[Role, MoEKernelConfig], Compiled]:
        """Return what the compiler reported, by kernel and :func:`compile_key`."""
        found: dict[tuple[Role, MoEKernelConfig], Compiled] = {}
        for trial in self.trials:
            if trial.compiled is not None and isinstance(trial.choice, MoEKernelConfig):
                found[Role(trial.subject.value), compile_key(trial.choice)] = trial.compiled
        return found


def compile_key(config: MoEKernelConfig) -> MoEKernelConfig:
    """Return the config without its shared memory ceiling, which changes nothing of what is compiled."""
    return replace(config, smem_size=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table's part of the page. ``name`` is unique on the page and safe in a file name."""

    name: str
    path: str
    backend: str
    device: DeviceInfo
    shape: MoEShape
    measured: Roof | None
    nominal: Roof | None
    kernels_version: str
    kernels_sha256: str
    triton: str
    torch: str
    driver: str
    measured_at: str
    command: str
    faults: tuple[str, ...]
    points: tuple[Point, ...]
    trials: TrialSet | None = None
    routing: str = UNIFORM

    @property
    def title(self) -> str:
        """Device, shape, and whatever else is out of the ordinary, in one line: pictures travel alone."""
        routed = "" if self.routing == UNIFORM else f" · {self.routing[:40]} routing"
        unmeasured = "" if self.backend == "cuda" else f" · {self.backend}"
        return f"{self.device.name} · {self.shape.key}{routed}{unmeasured}"
