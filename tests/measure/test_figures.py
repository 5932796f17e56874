"""Every figure says where it comes from, and none is invented."""

from __future__ import annotations

import pytest

from moetune.measure import figures
from moetune.measure.counters import KernelCounters
from moetune.measure.parts import Part
from moetune.measure.timer import Sample
from moetune.models.roofline import Work
from moetune.outcome import Compiled, Figure, Source
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=64, block_n=128, block_k=64, num_warps=4)
WORK = Work(flops=2e9, weight_bytes=9e6, activation_bytes=1e6, touched_experts=8)


def compiled(fixed, loop):
    return Compiled(
        registers=128, spills=0, smem_bytes=1, block_size=128, fixed_instructions=fixed, loop_instructions=loop
    )


def test_bandwidth_is_the_least_bytes_over_the_time():
    outcome = figures.measured(Sample(10.0, 0.1, 5), WORK, Figure.unavailable("not asked"))
    assert outcome.bandwidth_gbps == Figure(1000.0, Source.ANALYTICAL)  # 10 MB in 10 us
    assert outcome.flops_per_byte == Figure(200.0, Source.ANALYTICAL)


def test_issued_instructions_are_counted_by_tile_step_and_warp():
    got = figures.warp_instructions(compiled(300, 100), CONFIG, SHAPE, Role.GATE_UP, [64, 1, 0, 65])
    tiles, steps = (1 + 1 + 0 + 2) * 112, 64
    assert got == tiles * (300 + 100 * steps) * 4


@pytest.mark.parametrize(
    "known", [None, compiled(None, None), compiled(300, None)], ids=["never-compiled", "no-loop", "half"]
)
def test_code_that_cannot_be_counted_has_no_issue_efficiency_but_a_reason(known):
    instructions = figures.warp_instructions(known, CONFIG, SHAPE, Role.DOWN, [8])
    figure = figures.IssueRate(132, 1.98e9).efficiency(instructions, 10.0)
    assert (figure.value, figure.source) == (None, Source.UNAVAILABLE)
    assert "loop" in figure.reason


def test_issue_efficiency_is_a_share_of_all_slots_at_the_clock():
    rate = figures.IssueRate(132, 1e9)
    assert rate.efficiency(132 * 4 * 1e4 / 2, 10.0) == Figure(0.5, Source.STATIC)


def test_without_a_clock_there_is_no_issue_efficiency():
    assert figures.IssueRate(132, None).efficiency(1e6, 10.0) == Figure.unavailable(figures.NO_CLOCK)


def test_a_count_above_the_slots_is_an_error_not_a_hundred_percent():
    assert figures.IssueRate(1, 1e9).efficiency(1e9, 10.0) == Figure.unavailable(figures.TOO_MANY)


def launch(**fields):
    return KernelCounters(part=Part.GATE_UP, kernel="k", **fields)


def test_counters_of_all_launches_are_joined_with_the_profilers_own_time():
    launches = [
        launch(duration_ns=3000.0, dram_read_bytes=9e6, dram_write_bytes=0.0, issue_active_percent=10.0,
               cycles_active=3000.0, mma_flops=1e9, wgmma_flops=0.0),
        launch(duration_ns=1000.0, dram_read_bytes=1e6, dram_write_bytes=2e6, issue_active_percent=50.0,
               cycles_active=1000.0, mma_flops=0.0, wgmma_flops=2e9),
    ]  # fmt: skip
    got = figures.counted(launches, WORK)
    assert got.bandwidth_gbps == Figure(3000.0, Source.COUNTER)
    assert got.flops_per_byte.value == pytest.approx(WORK.flops / 12e6)  # useful FLOPs, not the 3e9 that tiles computed
    assert got.flops_per_byte.source is Source.COUNTER
    assert got.issue_efficiency.value == pytest.approx(0.2)


def test_a_chip_that_counts_no_bytes_gets_reasons_not_zeros():
    got = figures.counted([launch(duration_ns=1000.0)], WORK)
    for figure in (got.bandwidth_gbps, got.flops_per_byte, got.issue_efficiency):
        assert figure.source is Source.UNAVAILABLE
        assert figure.reason


def test_flops_by_formula_over_counted_bytes_say_so():
    got = figures.counted([launch(dram_read_bytes=8e6, dram_write_bytes=2e6)], WORK)
    assert got.flops_per_byte.value == 200.0
    assert got.flops_per_byte.reason == "bytes counted; FLOPs by formula, padding not counted as work"
