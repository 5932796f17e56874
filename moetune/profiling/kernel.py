"""Put one part's profile together from what is known: least work, compiler, events, counters."""

from __future__ import annotations

from collections.abc import Callable

from moetune.measure.parts import Part
from moetune.models.roofline import limit
from moetune.outcome import Compiled, Figure, Source
from moetune.profiling.analytical import (
    ROLES,
    Load,
    blocks_per_sm,
    blocks_per_sm_by_smem,
    instructions,
    issue_share,
    tile_count,
)
from moetune.profiling.facts import Facts
from moetune.profiling.page import KernelFigures, KernelProfile
from moetune.profiling.traffic import Traffic, explain_bytes
from moetune.profiling.verdict import Evidence, judge
from moetune_kernels.config import MoEKernelConfig
from moetune_kernels.shape import ACTIVATION_BYTES


def kernel_profile(facts: Facts) -> KernelProfile:
    """Return the figures and the verdict of one part."""
    figures = _figures(facts)
    traffic = _traffic(facts)
    work, ceilings = facts.work, facts.ceilings
    return KernelProfile(
        part=facts.part,
        kernels=facts.names,
        choice=_words(facts.config),
        registers=_known(facts.compiled, facts.mean("registers"), "registers"),
        spills=facts.compiled.spills if facts.compiled else None,
        smem_bytes=facts.compiled.smem_bytes if facts.compiled else None,
        limit=limit(work, ceilings.bytes_per_s, ceilings.flops),
        figures=figures,
        bytes_note=None if traffic is None else explain_bytes(traffic),
        verdict=judge(_evidence(facts, figures, traffic)),
    )


def _figures(facts: Facts) -> KernelFigures:
    work = facts.work
    duration_ns, dram = facts.total("duration_ns"), facts.total("dram_bytes")
    no_counter = Figure.unavailable(facts.why_no_counters)
    rate = _bandwidth(facts)
    return KernelFigures(
        time_us=_figure(facts.time_us, Source.EVENT) or Figure.unavailable(facts.why_no_time),
        ncu_time_us=_scaled(duration_ns, 1e-3, Source.COUNTER) or no_counter,
        bound_us=Figure(facts.bound_us, Source.ANALYTICAL),
        flops=Figure(work.flops, Source.ANALYTICAL),
        flops_per_byte=_scaled(dram, 1.0, Source.COUNTER, lambda counted: work.flops / max(counted, 1.0))
        or Figure(work.flops_per_byte, Source.ANALYTICAL),
        tflops=_scaled(facts.time_us, 1.0, Source.ANALYTICAL, lambda time: work.flops / time / 1e6)
        or Figure.unavailable(facts.why_no_time),
        min_bytes=Figure(work.bytes_min, Source.ANALYTICAL),
        dram_bytes=_figure(dram, Source.COUNTER) or no_counter,
        bandwidth_gbps=rate,
        of_nominal=_share(rate, facts.ceilings.nominal_bytes_per_s, "this device's data sheet is not listed"),
        of_measured=_share(rate, facts.ceilings.measured_bytes_per_s, "no ceiling was measured"),
        issue_efficiency=_issue_efficiency(facts),
        issue_ceiling=_issue_ceiling(facts),
        tensor_activity=_scaled(facts.mean("tensor_percent"), 0.01, Source.COUNTER) or _tensor_estimate(facts),
        occupancy=_scaled(facts.mean("occupancy_percent"), 0.01, Source.COUNTER) or no_counter,
        l2_bytes=_figure(facts.total("l2_bytes"), Source.COUNTER) or no_counter,
        bank_conflicts=_figure(facts.total("bank_conflicts"), Source.COUNTER) or no_counter,
        tiles=_tiles(facts),
        waves=_waves(facts),
        padding=_padding(facts),
    )


def _bandwidth(facts: Facts) -> Figure:
    """DRAM bytes over ncu's own duration; without counters the least bytes over the event time, a lower bound."""
    duration_ns, dram = facts.total("duration_ns"), facts.total("dram_bytes")
    if duration_ns and dram is not None:
        return Figure(dram / duration_ns, Source.COUNTER)
    if facts.time_us:
        reason = "least bytes over the time: a lower bound"
        return Figure(facts.work.bytes_min / facts.time_us / 1e3, Source.ANALYTICAL, reason)
    return Figure.unavailable(facts.why_no_time)


def _issue_efficiency(facts: Facts) -> Figure:
    counted = facts.mean("issue_active_percent")
    if counted is not None:
        return Figure(counted / 100, Source.COUNTER)
    count = _static_instructions(facts)
    if count is None or facts.clock_hz is None or not facts.time_us:
        why = facts.why_no_time if not facts.time_us else "no counters, and no single counted main loop in the code"
        return Figure.unavailable(why)
    reason = "instructions counted in the code, over all issue slots of the measured time at the boost clock"
    return Figure(issue_share(count, facts.device, facts.clock_hz, facts.time_us), Source.STATIC, reason)


def _issue_ceiling(facts: Facts) -> Figure:
    """What the code's instructions would be, as a share of the issue slots, if it ran in ``bound_us``."""
    if facts.config is None:
        return Figure.unavailable("not a grouped GEMM")
    executed, clock = facts.total("instructions"), facts.mean("sm_clock_hz")
    if executed is not None and clock and facts.bound_us:
        return Figure(issue_share(executed, facts.device, clock, facts.bound_us), Source.COUNTER)
    count = _static_instructions(facts)
    if count is None or facts.clock_hz is None or not facts.bound_us:
        return Figure.unavailable("no counters, and no single counted main loop in the code")
    return Figure(issue_share(count, facts.device, facts.clock_hz, facts.bound_us), Source.STATIC)


def _static_instructions(facts: Facts) -> float | None:
    if facts.compiled is None or facts.config is None:
        return None
    return instructions(facts.load, facts.config, ROLES[facts.part], facts.compiled)


def _tensor_estimate(facts: Facts) -> Figure:
    if facts.config is None:
        return Figure.unavailable("no tensor instructions in this part")
    if not facts.time_us:
        return Figure.unavailable(facts.why_no_time)
    executed = facts.work.flops * facts.load.padding(facts.config.block_m)
    reason = "FLOPs, padding included, over the time and the device's FLOP/s"
    return Figure(executed / (facts.time_us * 1e-6) / facts.ceilings.flops, Source.ANALYTICAL, reason)


def _tiles(facts: Facts) -> Figure:
    if facts.config is None:
        return Figure.unavailable("not a grouped GEMM")
    return Figure(tile_count(facts.load, facts.config, ROLES[facts.part]), Source.ANALYTICAL)


def _waves(facts: Facts) -> Figure:
    if facts.config is None:
        return _figure(facts.total("waves_per_sm"), Source.COUNTER) or Figure.unavailable("not a grouped GEMM")
    role = ROLES[facts.part]
    tiles = tile_count(facts.load, facts.config, role)
    if facts.compiled is not None:
        places = facts.device.sm_count * blocks_per_sm(facts.device, facts.compiled)
        return Figure(tiles / places, Source.STATIC)
    guessed = blocks_per_sm_by_smem(facts.device, facts.config, facts.load.shape, role)
    return Figure(tiles / (facts.device.sm_count * guessed), Source.ANALYTICAL)


def _padding(facts: Facts) -> Figure:
    if facts.config is None:
        return Figure.unavailable("not a grouped GEMM")
    executed = facts.total("tensor_flops")
    if executed and facts.work.flops:
        return Figure(executed / facts.work.flops, Source.COUNTER)
    return Figure(facts.load.padding(facts.config.block_m), Source.ANALYTICAL)


def _traffic(facts: Facts) -> Traffic | None:
    read, written = facts.total("dram_read_bytes"), facts.total("dram_write_bytes")
    if read is None or written is None:
        return None
    load, blocks = facts.load, 1.0
    if facts.config is not None and load.touched:
        blocks = load.rows(facts.config.block_m) / facts.config.block_m / load.touched
    return Traffic(
        part=facts.part,
        read=read,
        written=written,
        work=facts.work,
        output_bytes=_output_bytes(load, facts.part),
        l2_bytes=facts.device.l2_bytes,
        blocks_per_expert=blocks,
    )


def _output_bytes(load: Load, part: Part) -> float:
    shape = load.shape
    rows_and_width = {
        Part.ROUTING: (load.slots, 6),  # weight, id and position: three 32-bit numbers per slot
        Part.COPY: (load.slots, shape.hidden),
        Part.GATE_UP: (load.slots, shape.inter),
        Part.DOWN: (load.slots, shape.hidden),
        Part.COMBINE: (load.tokens, shape.hidden),
    }
    rows, width = rows_and_width[part]
    return rows * width * ACTIVATION_BYTES


def _evidence(facts: Facts, figures: KernelFigures, traffic: Traffic | None) -> Evidence:
    dram = figures.of_measured.value if figures.of_measured.value is not None else figures.of_nominal.value
    issue = facts.mean("issue_elapsed_percent")
    return Evidence(
        part=facts.part,
        limit=limit(facts.work, facts.ceilings.bytes_per_s, facts.ceilings.flops),
        bound_us=facts.bound_us,
        time_us=facts.time_us,
        estimated=figures.bandwidth_gbps.source is not Source.COUNTER,
        tensor=figures.tensor_activity.value,
        dram=dram,
        issue=figures.issue_efficiency.value if issue is None else issue / 100,
        issue_ceiling=figures.issue_ceiling.value,
        occupancy=figures.occupancy.value,
        waves=figures.waves.value if facts.config is not None else None,
        padding=figures.padding.value or 1.0,
        byte_ratio=None if traffic is None else traffic.ratio,
        conflicts=_conflicts(facts),
        spills=facts.compiled.spills if facts.compiled else None,
        prefetch=facts.config.prefetch_distance if facts.config else None,
    )


def _conflicts(facts: Facts) -> float | None:
    lost, cycles = facts.total("bank_conflicts"), facts.total("cycles_active")
    return lost / (cycles * facts.device.sm_count) if lost is not None and cycles else None


def _words(config: MoEKernelConfig | None) -> str:
    if config is None:
        return ""
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
    return f"{config.structure.value} {tile}, {config.num_warps} warps, prefetch {config.prefetch_distance}"


def _known(compiled: Compiled | None, counted: float | None, field: str) -> int | None:
    if compiled is not None:
        return getattr(compiled, field)
    return None if counted is None else round(counted)


def _figure(value: float | None, source: Source) -> Figure | None:
    return None if value is None else Figure(value, source)


def _scaled(
    value: float | None, scale: float, source: Source, formula: Callable[[float], float] | None = None
) -> Figure | None:
    if value is None:
        return None
    return Figure(formula(value) if formula else value * scale, source)


def _share(rate: Figure, peak_bytes_per_s: float | None, why: str) -> Figure:
    if rate.value is None:
        return rate
    if not peak_bytes_per_s:
        return Figure.unavailable(why)
    return Figure(rate.value * 1e9 / peak_bytes_per_s, rate.source)
