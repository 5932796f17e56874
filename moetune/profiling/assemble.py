"""Put one token count's page together from what the events, the compiler and the counters said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moetune.measure.clocks import ClockReading
from moetune.measure.counters import KernelCounters
from moetune.measure.parts import Part
from moetune.models.roofline import bound_us, layer_work, limit, nominal_peaks
from moetune.outcome import Compiled, Failed, Figure, Source
from moetune.profiling.analytical import Load
from moetune.profiling.facts import Facts
from moetune.profiling.kernel import kernel_profile
from moetune.profiling.page import Ceilings, TokenProfile
from moetune.profiling.plans import Chosen
from moetune_kernels.device import DeviceInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One token count as the events saw it."""

    chosen: Chosen
    load: Load
    part_us: Mapping[Part, float]
    layer_us: float | None
    compiled: Mapping[Part, Compiled]
    names: Mapping[Part, tuple[str, ...]]
    clocks: ClockReading


def assemble(
    timed: Timed, device: DeviceInfo, ceilings: Ceilings, counters: list[KernelCounters] | Failed | None
) -> TokenProfile:
    """Put one token count's page together."""
    chosen, load = timed.chosen, timed.load
    work = layer_work(load.shape, load.tokens, touched_experts=load.touched, slots=load.slots)
    launches = [] if counters is None or isinstance(counters, Failed) else counters
    facts = Facts(
        device=device,
        ceilings=ceilings,
        clock_hz=_clock_hz(timed.clocks, device),
        load=load,
        part=Part.ROUTING,
        plan=chosen.plan,
        why_no_counters=counters.reason if isinstance(counters, Failed) else "not counted",
    )
    kernels = [
        kernel_profile(
            replace(
                facts,
                part=part,
                names=timed.names[part],
                compiled=timed.compiled.get(part),
                time_us=time_us,
                counters=tuple(launch for launch in launches if launch.part is part) or None,
            )
        )
        for part, time_us in timed.part_us.items()
    ]
    return TokenProfile(
        tokens=chosen.tokens,
        plan=chosen.plan,
        plan_source=chosen.source,
        touched_experts=load.touched,
        layer_time_us=_layer_time(timed),
        bound_us=Figure(bound_us(work, ceilings.bytes_per_s, ceilings.flops), Source.ANALYTICAL),
        limit=limit(work, ceilings.bytes_per_s, ceilings.flops),
        kernels=tuple(kernels),
        notes=tuple(_notes(counters, launches, chosen)),
    )


def _layer_time(timed: Timed) -> Figure:
    if timed.layer_us is not None:
        return Figure(timed.layer_us, Source.EVENT)
    return Figure(sum(timed.part_us.values()), Source.COMPOSED, "sum of the parts")


def _clock_hz(clocks: ClockReading, device: DeviceInfo) -> float | None:
    if clocks.sm_mhz:
        return clocks.sm_mhz * 1e6
    peaks = nominal_peaks(device)
    return peaks.sm_clock_hz if peaks else None


def _notes(
    counters: list[KernelCounters] | Failed | None, launches: Sequence[KernelCounters], chosen: Chosen
) -> list[str]:
    notes = []
    if isinstance(counters, Failed):
        notes.append(f"no counters at {chosen.tokens} tokens: {counters.reason}")
    replayed = [launch.kernel for launch in launches if (launch.passes or 1) > 1]
    if replayed:
        notes.append(f"ncu replayed {', '.join(dict.fromkeys(replayed))}: figures from different passes may disagree")
    if not chosen.tuned:
        notes.append("this plan is not tuned: `moetune sweep` may find a faster one")
    return notes
