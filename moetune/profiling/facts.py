"""Everything known of one part of the layer at one token count, before it is judged."""

from __future__ import annotations

from dataclasses import dataclass

from moetune.measure.counters import KernelCounters
from moetune.measure.parts import Part
from moetune.models.roofline import Work, bound_us
from moetune.outcome import Compiled
from moetune.profiling.analytical import ROLES, Load, part_work
from moetune.profiling.page import Ceilings
from moetune_kernels.config import MoEKernelConfig
from moetune_kernels.device import DeviceInfo
from moetune_kernels.plan import LayerPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One part: where it runs, what it must do, and what the compiler, the events and the counters say.

    Args:
        device, ceilings, clock_hz: where it runs; the SM clock is the data sheet's boost unless it was measured.
        load: how the tokens fall.
        part, plan: what runs.
        names: the launched kernels.
        compiled: what the compiler says of the GEMM.
        time_us: by CUDA events, summed over the launches; None where nothing ran.
        counters: one per launch; None without counters.
        why_no_time, why_no_counters: the reasons that unavailable figures carry.
    """

    device: DeviceInfo
    ceilings: Ceilings
    clock_hz: float | None
    load: Load
    part: Part
    plan: LayerPlan
    names: tuple[str, ...] = ()
    compiled: Compiled | None = None
    time_us: float | None = None
    counters: tuple[KernelCounters, ...] | None = None
    why_no_time: str = "nothing ran"
    why_no_counters: str = "no hardware counters"

    @property
    def config(self) -> MoEKernelConfig | None:
        """The GEMM's config; None for the small parts."""
        return self.plan.config(ROLES[self.part]) if self.part in ROLES else None

    @property
    def work(self) -> Work:
        """The least work of the part."""
        return part_work(self.load, self.part)

    @property
    def bound_us(self) -> float:
        """The time that no kernel can beat."""
        return bound_us(self.work, self.ceilings.bytes_per_s, self.ceilings.flops)

    def total(self, field: str) -> float | None:
        """Return a counter summed over the launches; None where one of them lacks it."""
        values = [getattr(launch, field) for launch in self.counters or ()]
        return sum(values) if values and None not in values else None

    def mean(self, field: str) -> float | None:
        """Return a counter averaged over the launches by duration; None where one of them lacks it."""
        launches = self.counters or ()
        values = [getattr(launch, field) for launch in launches]
        times = [launch.duration_ns or 0.0 for launch in launches]
        if not values or None in values or not sum(times):
            return None
        return sum(value * time for value, time in zip(values, times, strict=True)) / sum(times)
