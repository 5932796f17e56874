"""A page from hand-made events and counters: the arithmetic, the sources, and 80 columns."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from moetune.measure.clocks import ClockReading
from moetune.measure.counters import KernelCounters
from moetune.measure.parts import Part
from moetune.outcome import Compiled, Failed, FailureKind, Source
from moetune.profiling.analytical import Load
from moetune.profiling.assemble import Timed, assemble
from moetune.profiling.page import Ceilings, Kind, LayerProfile
from moetune.profiling.plans import Chosen
from moetune.profiling.request import DEFAULT_SHAPE
from moetune.profiling.terminal import as_text
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.plan import LayerPlan

H200 = TARGETS["sm_90"]
SHAPE = DEFAULT_SHAPE  # 64 experts of 4096 x 14336, top 2
TOKENS = 4096
GATE_UP = MoEKernelConfig(structure=Structure.TMA_PERMUTE, block_m=128, block_n=128, block_k=64, num_warps=8)
DOWN = replace(GATE_UP, structure=Structure.TMA, block_n=256)
PLAN = LayerPlan(gate_up=GATE_UP, down=DOWN)
CEILINGS = Ceilings(
    nominal_bytes_per_s=4.8e12, nominal_flops=989e12, measured_bytes_per_s=4.0e12, measured_flops=700e12
)
COUNTS = (128,) * 64
LOAD = Load.real(SHAPE, TOKENS, COUNTS)
COMPILED = Compiled(
    registers=200, spills=0, smem_bytes=200_000, block_size=256, fixed_instructions=400, loop_instructions=80
)
PART_US = {Part.ROUTING: 20.0, Part.COPY: 60.0, Part.GATE_UP: 4000.0, Part.DOWN: 2000.0, Part.COMBINE: 40.0}


def timed(**changes):
    base = {
        "chosen": Chosen(TOKENS, PLAN, "default plan, because no table was found", tuned=False),
        "load": LOAD,
        "part_us": PART_US,
        "layer_us": 6150.0,
        "compiled": {Part.GATE_UP: COMPILED, Part.DOWN: COMPILED},
        "names": {part: (f"{part.value}_kernel",) for part in PART_US},
        "clocks": ClockReading(sm_mhz=1980),
    }
    return Timed(**(base | changes))


def counters(part, **values):
    return KernelCounters(part=part, kernel=f"{part.value}_kernel", passes=1, **values)


GATE_UP_COUNTED = counters(
    Part.GATE_UP,
    duration_ns=4_000_000,
    dram_read_bytes=15.2e9,
    dram_write_bytes=0.2e9,
    issue_active_percent=14.0,
    issue_elapsed_percent=13.0,
    instructions=3.0e9,
    sm_clock_hz=1.9e9,
    tensor_percent=60.0,
    wgmma_flops=LOAD.slots * 4 * 4096 * 14336 * 1.25,
    mma_flops=0.0,
    occupancy_percent=12.0,
    cycles_active=7.0e6,
    bank_conflicts=1000.0,
    l2_bytes=40e9,
)


def kernel(profile, part):
    return next(kernel for kernel in profile.kernels if kernel.part is part)


def test_counted_figures_are_the_counters_own_arithmetic():
    figures = kernel(assemble(timed(), H200, CEILINGS, [GATE_UP_COUNTED]), Part.GATE_UP).figures
    flops = LOAD.slots * 4 * 4096 * 14336
    assert figures.dram_bytes.value == pytest.approx(15.4e9)
    assert figures.bandwidth_gbps.value == pytest.approx(3850.0)  # bytes over ncu's duration, not over the events'
    assert figures.of_nominal.value == pytest.approx(3850 / 4800)
    assert figures.of_measured.value == pytest.approx(3850 / 4000)
    assert figures.flops_per_byte.value == pytest.approx(flops / 15.4e9)
    assert figures.issue_efficiency.value == pytest.approx(0.14)
    assert figures.tensor_activity.value == pytest.approx(0.6)
    assert figures.padding.value == pytest.approx(1.25)  # FLOPs counted over FLOPs of real rows
    assert figures.tflops.value == pytest.approx(flops / 4000e-6 / 1e12)
    bound_s = max(figures.min_bytes.value / 4.0e12, flops / 700e12)
    assert figures.bound_us.value == pytest.approx(bound_s * 1e6)
    assert figures.issue_ceiling.value == pytest.approx(3.0e9 / (4 * 132 * 1.9e9 * bound_s))
    sources = {name: value["source"] for name, value in figures.to_json().items()}
    assert {name for name, source in sources.items() if source == "counter"} == {
        "ncu_time_us", "flops_per_byte", "dram_bytes", "bandwidth_gbps", "of_nominal", "of_measured", "issue_efficiency",
        "issue_ceiling", "tensor_activity", "occupancy", "l2_bytes", "bank_conflicts", "padding",
    }  # fmt: skip
    assert sources["time_us"] == "event"


def test_without_counters_every_estimate_is_labelled_and_the_rest_is_unavailable_with_the_reason():
    failed = Failed(FailureKind.RESOURCES, "the driver forbids reading counters")
    profile = assemble(timed(), H200, CEILINGS, failed)
    figures = kernel(profile, Part.GATE_UP).figures
    assert figures.issue_efficiency.source is Source.STATIC
    tiles, steps = 64 * 14336 / 128, 4096 / 64
    instructions = tiles * 8 * (400 + 80 * steps)
    assert figures.issue_efficiency.value == pytest.approx(instructions / (4 * 132 * 1.98e9 * 4000e-6))
    assert figures.bandwidth_gbps.source is Source.ANALYTICAL
    assert figures.bandwidth_gbps.value == pytest.approx(figures.min_bytes.value / 4000 / 1e3)
    assert figures.dram_bytes.reason == failed.reason
    assert any(failed.reason in note for note in profile.notes)
    assert "estimated" in kernel(profile, Part.GATE_UP).verdict.sentence


def test_several_launches_of_one_part_are_summed_and_averaged_by_duration():
    launches = [
        counters(Part.ROUTING, duration_ns=1000, dram_read_bytes=10.0, dram_write_bytes=0.0, issue_active_percent=10.0),
        counters(Part.ROUTING, duration_ns=3000, dram_read_bytes=30.0, dram_write_bytes=2.0, issue_active_percent=50.0),
    ]
    figures = kernel(assemble(timed(), H200, CEILINGS, launches), Part.ROUTING).figures
    assert figures.ncu_time_us.value == pytest.approx(4.0)
    assert figures.dram_bytes.value == pytest.approx(42.0)
    assert figures.issue_efficiency.value == pytest.approx(0.40)


def test_a_counter_missing_in_one_launch_makes_no_half_sum():
    launches = [
        counters(Part.ROUTING, duration_ns=1000, dram_read_bytes=10.0, dram_write_bytes=0.0),
        counters(Part.ROUTING, duration_ns=3000),
    ]
    assert kernel(assemble(timed(), H200, CEILINGS, launches), Part.ROUTING).figures.dram_bytes.value is None


def test_a_layer_whose_experts_share_weights_is_composed_not_timed():
    profile = assemble(timed(layer_us=None), H200, CEILINGS, None)
    assert profile.layer_time_us.source is Source.COMPOSED
    assert profile.layer_time_us.value == pytest.approx(sum(PART_US.values()))


def test_a_replayed_kernel_is_named():
    profile = assemble(timed(), H200, CEILINGS, [replace(GATE_UP_COUNTED, passes=3)])
    assert any("ncu replayed gate_up_kernel" in note for note in profile.notes)


def test_low_issue_beside_a_busy_memory_is_no_complaint_about_issue():
    assert kernel(assemble(timed(), H200, CEILINGS, [GATE_UP_COUNTED]), Part.GATE_UP).verdict.kind is Kind.BANDWIDTH


def page(token_profile, **changes):
    return LayerProfile(
        shape=SHAPE, device=H200, measured=True, ceilings=CEILINGS, versions={"moetune": "0.1.0", "ncu": "2025.3.1.0"},
        command="moetune profile --experts 64 --top-k 2", tokens=(token_profile,), **changes,
    )  # fmt: skip


def test_a_page_with_all_five_parts_fits_80_columns_and_is_finite_json():
    everything = [GATE_UP_COUNTED] + [
        replace(GATE_UP_COUNTED, part=part, kernel=f"{part.value}_kernel") for part in Part if part is not Part.GATE_UP
    ]
    made = page(assemble(timed(), H200, CEILINGS, everything))
    text = as_text(made)
    assert max(map(len, text.splitlines())) <= 80
    for title in ("time by ncu", "of measured", "issue eff.", "tensor pipe", "bank conflicts", "gate_up", "combine"):
        assert title in text
    assert "…" not in text  # nothing was cut
    json.dumps(made.to_json(), allow_nan=False)


def test_a_page_without_counters_shows_the_lines_that_would_allow_them():
    made = page(
        assemble(timed(), H200, CEILINGS, None),
        counters_missing="the NVIDIA driver lets only administrators read counters",
        counters_fixes=("docker run --cap-add=SYS_ADMIN …",),
    )
    text = as_text(made)
    assert "No hardware counters: the NVIDIA driver" in text
    assert "docker run --cap-add=SYS_ADMIN" in text
