"""Counters by CUPTI on a real GPU: they agree with ncu's, with known traffic, and each launch has its own.

Written without a GPU. What is checked here is what nothing else can check: that CUPTI counts these launches at all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from moetune.measure.counter_names import MetricSet, chip_of
from moetune.measure.counter_ways import CUPTI, NCU
from moetune.measure.counters import CounterJob, Reader, read_counters, set_metrics
from moetune.measure.parts import Part
from moetune.measure.sweep_counters import CUPTI_FIRST, SweepCounters
from moetune.outcome import Failed, Source
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.device import device_info
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape, WeightFormat

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SHAPE = MoEShape(hidden=4096, inter=4096, local_experts=8, top_k=2)  # 100 MB an expert: no L2 holds the layer
SMALL = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=128, prefetch_distance=4)
LARGE = MoEKernelConfig(structure=Structure.GATHER, block_m=64, block_n=64, block_k=64)
PLANS = {4: LayerPlan(gate_up=SMALL, down=SMALL), 2048: LayerPlan(gate_up=LARGE, down=LARGE)}
JOBS = {tokens: CounterJob(shape=SHAPE, tokens=tokens, plan=plan) for tokens, plan in PLANS.items()}
GEMMS = (Part.GATE_UP, Part.DOWN)
SETS = (MetricSet.HEADLINE, MetricSet.MAIN)  # what a sweep reads, and the instructions

# In a process of its own, as a sweep does: what the profiler hooks stays hooked. It prints one JSON line.
HEAD = """
import json, torch
from moetune.measure import gpu_driver
from moetune.measure.cupti import library
from moetune.measure.cupti.ranges import RangeProfiler
from moetune.measure.timer import Timer, finish
from moetune_kernels.device import device_info

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
torch.cuda.synchronize()
timer = Timer(device, device_info(0).l2_bytes)
METRICS = {metrics!r}


def flush():
    timer.cool()
    finish()


def counted(profiler, launch):
    def whole():
        launch()
        finish()

    return profiler.count(whole, flush)


cupti = library.load()
"""


@pytest.fixture(scope="module", autouse=True)
def _allowed():
    blocked = CUPTI.blocked(device_info(0))
    if blocked is not None:
        pytest.skip(f"no counters by CUPTI: {blocked.reason}")
    if chip_of(device_info(0).sm) is None:
        pytest.skip("no counter names are known for this GPU")


def metric_names():
    return CUPTI.readable(set_metrics(WeightFormat.BF16, MetricSet.HEADLINE, device_info(0)))


def in_a_process(code):
    """Run ``code`` behind HEAD and return what its last line of JSON says."""
    head = HEAD.format(metrics=list(metric_names().values()))
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def by_cupti():
    found = read_counters(list(JOBS.values()), by=Reader(CUPTI), device=device_info(0), sets=SETS)
    for launches in found.values():
        assert not isinstance(launches, Failed), launches.reason
    return {tokens: found[job] for tokens, job in JOBS.items()}


@pytest.fixture(scope="module")
def by_ncu():
    blocked = NCU.blocked(None)
    if blocked is not None:
        pytest.skip(f"no counters by ncu: {blocked.reason}")
    found = read_counters(list(JOBS.values()), by=Reader(NCU), device=device_info(0), sets=SETS)
    return {tokens: found[job] for tokens, job in JOBS.items()}


@pytest.mark.parametrize("tokens", PLANS)
def test_every_launch_of_a_layer_is_counted(by_cupti, tokens):
    launches = by_cupti[tokens]
    assert {launch.part for launch in launches} == {Part.ROUTING, Part.GATE_UP, Part.DOWN, Part.COMBINE}
    for launch in launches:
        assert launch.duration_ns > 0
        assert 0 < launch.issue_active_percent <= 100
        assert launch.cycles_elapsed >= launch.cycles_active > 0


@pytest.mark.parametrize("tokens", PLANS)
def test_both_ways_agree_on_the_gemms(by_cupti, by_ncu, tokens):
    assert [launch.kernel for launch in by_cupti[tokens]] == [launch.kernel for launch in by_ncu[tokens]]
    for one, two in zip(by_cupti[tokens], by_ncu[tokens], strict=True):
        if one.part in GEMMS:
            assert one.tensor_flops == pytest.approx(two.tensor_flops, rel=0.01)
            assert one.dram_read_bytes == pytest.approx(two.dram_read_bytes, rel=0.05)
            assert one.instructions == pytest.approx(two.instructions, rel=0.01)


@pytest.mark.parametrize("tokens", PLANS)
def test_both_ways_agree_on_how_long_a_gemm_takes(by_cupti, by_ncu, tokens):
    """A range that lasted from the host's push to its pop would add tens of microseconds to each."""
    for one, two in zip(by_cupti[tokens], by_ncu[tokens], strict=True):
        if one.part in GEMMS:
            assert one.duration_ns == pytest.approx(two.duration_ns, rel=0.10, abs=3000)


def test_a_decode_gemm_reads_each_touched_expert_once_from_a_cold_l2(by_cupti):
    launch = next(launch for launch in by_cupti[4] if launch.part is Part.GATE_UP)
    rows = launch.tensor_flops / (4 * SHAPE.hidden * SHAPE.inter)
    touched = rows / SMALL.block_m  # at 8 slots no expert has more than one block
    assert launch.dram_read_bytes == pytest.approx(touched * 4 * SHAPE.hidden * SHAPE.inter, rel=0.05)


def test_a_copy_of_four_gib_moves_the_bytes_that_it_must():
    """What is dirty in the L2 at the end is not written yet: 60 MB of 4 GiB."""
    moved = in_a_process(
        """
        from copy_kernel import copy

        source = torch.zeros(1 << 30, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        copy(source, target)
        with RangeProfiler(cupti, gpu_driver.opened(), METRICS) as profiler:
            print(json.dumps(counted(profiler, lambda: copy(source, target))))
        """
    )
    names = metric_names()
    assert moved[names["dram_read_bytes"]] == pytest.approx(4 << 30, rel=0.05)
    assert moved[names["dram_write_bytes"]] == pytest.approx(4 << 30, rel=0.05)


def test_alternating_launches_of_very_different_size_keep_their_own_values():
    rows = in_a_process(
        """
        big = torch.zeros(64 << 20, dtype=torch.float32, device=device)
        small = torch.zeros(1 << 10, dtype=torch.float32, device=device)
        launches = [lambda: big.add_(1.0), lambda: small.add_(1.0)] * 4
        for launch in launches:
            launch()
        with RangeProfiler(cupti, gpu_driver.opened(), METRICS) as profiler:
            print(json.dumps([counted(profiler, launch) for launch in launches]))
        """
    )
    names = metric_names()
    read, times = ([row[names[field]] for row in rows] for field in ("dram_read_bytes", "duration_ns"))
    for big, small in zip(range(0, 8, 2), range(1, 8, 2), strict=True):
        assert read[big] == pytest.approx(256 << 20, rel=0.05)
        assert read[small] < 4 << 20
        assert times[big] > 10 * times[small]


def test_what_runs_between_the_launches_is_not_counted_and_two_kernels_at_once_are_refused():
    said = in_a_process(
        """
        x = torch.zeros(1 << 20, dtype=torch.float32, device=device)
        both = lambda: (x.add_(1.0), x.add_(1.0))
        both()
        with RangeProfiler(cupti, gpu_driver.opened(), METRICS) as profiler:
            one = counted(profiler, lambda: x.add_(1.0))  # the flush before it is two kernels at least
            try:
                said = str(counted(profiler, both))
            except library.CuptiError as error:
                said = str(error)
            again = counted(profiler, lambda: x.add_(1.0))
        print(json.dumps([one, said, again]))
        """
    )
    one, refused, again = said
    assert refused == "CUPTI counted 2 kernels where one was launched"
    assert one.keys() == again.keys()


def test_how_long_one_launch_takes_to_count(by_cupti):
    """A print, and a bound that only a replay or a save of the memory would break: 30 GB take far longer to copy."""
    spent = in_a_process(
        """
        import time
        held = torch.empty(torch.cuda.mem_get_info()[0] // 2, dtype=torch.uint8, device=device)
        x = torch.zeros(1 << 20, dtype=torch.float32, device=device)
        x.add_(1.0)
        with RangeProfiler(cupti, gpu_driver.opened(), METRICS) as profiler:
            counted(profiler, lambda: x.add_(1.0))
            cupti.seconds.clear()
            begin = time.perf_counter()
            for _ in range(20):
                counted(profiler, lambda: x.add_(1.0))
            each = (time.perf_counter() - begin) / 20
        spent = {name: value / 20 for name, value in cupti.seconds.items()}
        print(json.dumps({"each": each, "reusable": float(profiler._reusable)} | spent))
        """
    )
    print(f"a session {'can' if spent.pop('reusable') else 'cannot'} be started again as it is")
    print({name: f"{1e3 * value:.3f} ms" for name, value in sorted(spent.items(), key=lambda item: -item[1])})
    assert spent["each"] < 0.05


def test_a_sweeps_reader_uses_cupti_and_says_nothing_of_ncu():
    import torch

    reader, device = SweepCounters(SHAPE, 0, ways=CUPTI_FIRST), device_info(0)
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    reader.prepare(device)
    time.sleep(20.0)  # surely loaded by now
    assert before - torch.cuda.mem_get_info()[0] < 16 << 20
    begin = time.monotonic()
    found = reader.read(PLANS, device, 120.0, torch.cuda.empty_cache)
    print(f"{time.monotonic() - begin:.1f} s")
    for figures in found.values():
        assert not isinstance(figures, Failed), figures.reason
        assert figures.issue_efficiency.source is Source.COUNTER
        assert figures.issue_efficiency.reason is None, figures.issue_efficiency.reason
        assert 0 < figures.issue_efficiency.value <= 1
        assert figures.bandwidth_gbps.value > 0
