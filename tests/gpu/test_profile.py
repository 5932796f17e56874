"""The profile on a real GPU: times against bounds, and counters against what is known exactly."""

from __future__ import annotations

import time

import pytest

from moetune.measure.counter_ways import NCU
from moetune.measure.counters import PROFILE_SETS, SWEEP_SETS, CounterJob, counters_unavailable, read_counters
from moetune.measure.parts import Part
from moetune.measure.sweep_counters import SweepCounters
from moetune.outcome import Failed, Source
from moetune.profiling import ProfileRequest, profile
from moetune.profiling.terminal import as_text
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.device import device_info
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

pytestmark = pytest.mark.gpu

SHAPE = MoEShape(hidden=4096, inter=4096, local_experts=8, top_k=2)  # 100 MB an expert: no L2 holds the layer
SMALL = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=128, prefetch_distance=4)
LARGE = MoEKernelConfig(structure=Structure.GATHER, block_m=64, block_n=64, block_k=64)


@pytest.fixture(scope="module")
def counted():
    """Counters of a decode layer (mma.sync tiles) and of a prefill layer (warpgroup tiles on Hopper), one ncu worker each set."""
    reason = counters_unavailable()
    if reason is not None:
        pytest.skip(f"no hardware counters: {reason}")
    jobs = {
        "decode": CounterJob(shape=SHAPE, tokens=4, plan=LayerPlan(gate_up=SMALL, down=SMALL)),
        "prefill": CounterJob(shape=SHAPE, tokens=2048, plan=LayerPlan(gate_up=LARGE, down=LARGE)),
    }
    found = read_counters(list(jobs.values()), sets=PROFILE_SETS)
    return {name: found[job] for name, job in jobs.items()}


def part(launches, wanted):
    assert not isinstance(launches, Failed), launches
    return next(launch for launch in launches if launch.part is wanted)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["decode", "prefill"])
def test_every_launch_of_the_layer_was_counted_in_one_pass(counted, case):
    launches = counted[case]
    assert not isinstance(launches, Failed), launches
    assert {launch.part for launch in launches} == {Part.ROUTING, Part.GATE_UP, Part.DOWN, Part.COMBINE}
    for launch in launches:
        assert launch.passes in (None, 1)
        assert launch.duration_ns > 0
        assert 0 < launch.issue_active_percent <= 100
        assert launch.dram_bytes is not None


@pytest.mark.parametrize("case", ["decode", "prefill"])
@pytest.mark.parametrize("wanted", [Part.GATE_UP, Part.DOWN], ids=["gate_up", "down"])
def test_tensor_flops_are_whole_tiles_whichever_instruction_multiplied(counted, case, wanted):
    """FLOPs counted are rows of whole tiles: useful ones, plus padding that is less than a tile per touched expert."""
    launch, tokens = part(counted[case], wanted), {"decode": 4, "prefill": 2048}[case]
    config = {"decode": SMALL, "prefill": LARGE}[case]
    matrices = 2 if wanted is Part.GATE_UP else 1
    per_row = 2 * matrices * SHAPE.hidden * SHAPE.inter
    rows, slots = launch.tensor_flops / per_row, tokens * SHAPE.top_k
    assert rows == pytest.approx(round(rows), abs=1e-6)
    assert round(rows) % config.block_m == 0
    assert slots <= rows < slots + SHAPE.local_experts * config.block_m


def test_a_decode_gemm_reads_each_touched_expert_once_and_little_more(counted):
    launch = part(counted["decode"], Part.GATE_UP)
    rows = launch.tensor_flops / (4 * SHAPE.hidden * SHAPE.inter)
    touched = rows / SMALL.block_m  # at 8 slots no expert has more than one block
    least = touched * 2 * SHAPE.hidden * SHAPE.inter * 2
    assert launch.dram_read_bytes == pytest.approx(least, rel=0.05)


def test_a_sweeps_single_set_agrees_with_the_profiles(counted):
    job = CounterJob(shape=SHAPE, tokens=2048, plan=LayerPlan(gate_up=LARGE, down=LARGE))
    (headline,) = read_counters([job], sets=SWEEP_SETS).values()
    for wanted in (Part.GATE_UP, Part.DOWN):
        one, two = part(headline, wanted), part(counted["prefill"], wanted)
        assert one.tensor_flops == two.tensor_flops
        assert one.dram_bytes == pytest.approx(two.dram_bytes, rel=0.25)  # which blocks meet in L2 is not repeatable
        assert one.issue_active_percent == pytest.approx(two.issue_active_percent, rel=0.1)


@pytest.mark.timeout(900)
def test_a_profiler_started_ahead_takes_no_memory_counts_the_same_and_sooner():
    import torch

    reason = counters_unavailable()
    if reason is not None:
        pytest.skip(f"no hardware counters: {reason}")
    device, plans, took_s, found = device_info(0), {4: LayerPlan(gate_up=SMALL, down=SMALL)}, {}, {}
    reader = SweepCounters(SHAPE, 0, ways=(NCU,))
    for how in ("cold", "at once", "ahead"):  # the first one compiles
        torch.cuda.synchronize()
        before, _ = torch.cuda.mem_get_info()
        if how == "ahead":
            reader.prepare(device)
            time.sleep(20.0)  # surely loaded by now
            assert before - torch.cuda.mem_get_info()[0] < 16 << 20
        started_s = time.monotonic()
        found[how] = reader.read(plans, device, 120.0, torch.cuda.empty_cache)[4]
        took_s[how] = time.monotonic() - started_s
    print({how: f"{seconds:.1f} s" for how, seconds in took_s.items()})
    assert took_s["ahead"] < 0.7 * took_s["at once"]
    assert found["ahead"].bandwidth_gbps.source is Source.COUNTER
    assert found["ahead"].issue_efficiency.value == pytest.approx(found["at once"].issue_efficiency.value, rel=0.1)
    assert found["ahead"].flops_per_byte.value == pytest.approx(found["at once"].flops_per_byte.value, rel=0.1)


@pytest.mark.timeout(900)
def test_a_profile_stays_above_its_bounds_and_fits_the_terminal():
    page = profile(ProfileRequest(shape=SHAPE, tokens=(1, 256)))
    assert page.measured
    assert page.device == device_info(0)
    for one in page.tokens:
        assert one.layer_time_us.source is Source.EVENT
        assert one.layer_time_us.value > 0.9 * one.bound_us.value
        for kernel in one.kernels:
            assert kernel.figures.time_us.value > 0.9 * kernel.figures.bound_us.value
            assert kernel.verdict.sentence
    assert max(map(len, as_text(page).splitlines())) <= 80


def test_profiling_leaves_no_memory_behind():
    import torch

    before = torch.cuda.memory_allocated()
    profile(ProfileRequest(shape=SHAPE, tokens=(1,)))
    assert torch.cuda.memory_allocated() - before < 64 << 20
