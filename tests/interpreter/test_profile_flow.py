"""A layer taken apart gives the layer's result, and the flow around it runs, with the GPU's own calls replaced."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moetune.engine.backend import Ceilings
from moetune.measure import counter_jobs, counters_worker, cupti_worker
from moetune.measure.clocks import ClockReading
from moetune.measure.counters import CounterJob, KernelCounters
from moetune.measure.inputs import make_rows, rows_seed
from moetune.measure.ncu import Blocked
from moetune.measure.parts import SEED, Part, layer_parts, resident_weights
from moetune.measure.router import router_of
from moetune.models.routing import UNIFORM, Hot, Zipf
from moetune.outcome import Source
from moetune.profiling import ProfileRequest, live
from moetune.profiling.terminal import as_text
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.fused_moe import fused_moe_reference
from moetune_kernels.kernel_call import KernelCall, launch_all
from moetune_kernels.match import match
from moetune_kernels.plan import LayerPlan
from moetune_kernels.route import route_reference
from moetune_kernels.shape import MoEShape, WeightFormat

SHAPE = MoEShape(hidden=32, inter=48, local_experts=4, top_k=2, format=WeightFormat.FP16)
CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=16, block_k=16, prefetch_distance=2)
PLAN = LayerPlan(gate_up=CONFIG, down=CONFIG)
CPU = torch.device("cpu")


def result_of(parts):
    """Run every launch twice, out of order the second time, and return what combine wrote."""
    launch_all(tuple(call for _, call in parts.calls))
    launch_all(parts.of(Part.ROUTING))
    for part in (Part.GATE_UP, Part.DOWN, Part.COMBINE):
        launch_all(parts.of(part))
    return parts.of(Part.COMBINE)[0].args[2]


@pytest.mark.parametrize("tokens", [1, 40], ids=["one-launch-routing", "route-then-permute"])
@pytest.mark.parametrize("resident", [None, 1, 3], ids=["all-experts", "one-resident", "three-resident"])
def test_the_parts_together_are_the_layer_also_when_experts_share_weights(tokens, resident):
    weights = resident_weights(SHAPE, resident, CPU)
    parts = layer_parts(SHAPE, tokens, PLAN, weights)
    share = torch.arange(SHAPE.local_experts) % len(weights.w2)
    topk_weights, topk_ids = route_reference(parts.rows.logits, SHAPE.top_k)
    want = fused_moe_reference(parts.rows.x, weights.w13[share], weights.w2[share], topk_weights, topk_ids)
    assert match(result_of(parts), want, SHAPE.format) is None
    assert sum(parts.counts(SHAPE.local_experts)) == tokens * SHAPE.top_k
    assert parts.present == (Part.ROUTING, Part.GATE_UP, Part.DOWN, Part.COMBINE)


def test_a_rank_of_several_computes_only_the_slots_of_its_own_experts():
    shape = replace(SHAPE, local_experts=2, experts=4)
    weights = resident_weights(shape, None, CPU)
    parts = layer_parts(shape, 5, PLAN, weights)
    topk_weights, topk_ids = route_reference(parts.rows.logits, shape.top_k)
    want = fused_moe_reference(parts.rows.x, weights.w13, weights.w2, topk_weights, topk_ids)
    assert match(result_of(parts), want, shape.format) is None
    assert parts.counts(2) == tuple(int((topk_ids == expert).sum()) for expert in range(2))


def test_two_processes_would_route_alike():
    one, two = (layer_parts(SHAPE, 7, PLAN, resident_weights(SHAPE, None, CPU)) for _ in range(2))
    assert torch.equal(one.topk_ids, two.topk_ids)


@pytest.mark.parametrize("routing", [UNIFORM, Zipf(2.0), Hot(1.0)], ids=lambda one: one.text)
def test_counted_launches_route_the_very_rows_that_a_sweep_times(routing):
    """The sweep's backend, the worker that counts and the profile each make the rows themselves."""
    router = router_of(routing, SHAPE, SEED)
    parts = layer_parts(SHAPE, 7, PLAN, resident_weights(SHAPE, None, CPU), router)
    job = CounterJob(shape=SHAPE, tokens=7, plan=PLAN, routing=routing)
    cached = counter_jobs._JobCache(CPU).router(CounterJob.from_json(json.loads(json.dumps(job.to_json()))))
    for rows in (
        make_rows(SHAPE, 7, CPU, rows_seed(0, 7), router_of(routing, SHAPE, 0)),
        layer_parts(SHAPE, 7, PLAN, resident_weights(SHAPE, None, CPU), cached).rows,
    ):
        assert torch.equal(rows.logits, parts.rows.logits)
        assert torch.equal(rows.x, parts.rows.x)
    if routing == Hot(1.0):
        assert all(router.hot in row for row in parts.topk_ids.tolist())


class FakeGraphs:
    """Runs what a graph would capture, at once."""

    def __init__(self, stream):
        pass

    def capture(self, run):
        run()
        return run

    def close(self):
        pass


class FakeTimer:
    """Says 10 us for the first launch, 20 for the second, and so on."""

    def __init__(self, *_):
        pass

    def rounds(self, launches, count):
        return [[10.0 * (index + 1)] * count for index in range(len(launches))]


def cpu_weights(shape, held, place):
    del place
    return resident_weights(shape, held, CPU)


@pytest.fixture
def no_gpu_calls(monkeypatch):
    """Replace what only a GPU can do: streams, graphs, events and memory figures."""
    cuda = SimpleNamespace(
        set_device=lambda place: None,
        current_device=lambda: 0,
        mem_get_info=lambda place: (8 << 30, 8 << 30),
        Stream=lambda: None,
        empty_cache=lambda: None,
        synchronize=lambda: None,
        profiler=SimpleNamespace(start=lambda: None, stop=lambda: None),
    )
    fake = SimpleNamespace(cuda=cuda, device=lambda *_: SimpleNamespace(type="cpu", index=0))
    monkeypatch.setattr(live, "torch", fake)
    monkeypatch.setattr(live, "Timer", FakeTimer)
    monkeypatch.setattr(live, "CapturedLayers", FakeGraphs)
    reader = SimpleNamespace(read=lambda: ClockReading(sm_mhz=1980), close=lambda: None)
    monkeypatch.setattr(live, "Clocks", SimpleNamespace(of_device=lambda index: reader))
    monkeypatch.setattr(live, "measure_ceilings", lambda *_: Ceilings(bytes_per_s=4e12, flops=7e14))
    monkeypatch.setattr(live, "device_info", lambda index: TARGETS["sm_90"])
    monkeypatch.setattr(live, "resident_weights", cpu_weights)
    monkeypatch.setattr(live, "_reports", lambda *_: {})
    monkeypatch.setattr(live, "live_versions", lambda: {"moetune": "0"})
    for module in (counter_jobs, counters_worker, cupti_worker):
        monkeypatch.setattr(module, "torch", fake)
    monkeypatch.setattr(counter_jobs, "finish", lambda: None)
    monkeypatch.setattr(counter_jobs, "resident_weights", cpu_weights)


def notes_of(jobs, counting):
    """Return what the worker notes of the jobs."""
    notes, request = io.StringIO(), {"device_index": 0, "jobs": [job.to_json() for job in jobs]}
    counter_jobs.run(request, notes, counting, counter_jobs.Phases())
    return [json.loads(line) for line in notes.getvalue().splitlines()]


REQUEST = ProfileRequest(shape=SHAPE, tokens=(1, 40), plan_choice=PLAN)


def test_the_live_page_without_counters_says_why_and_how(no_gpu_calls, monkeypatch):
    monkeypatch.setattr(live, "blocked", lambda: Blocked("ncu was not found", ("install ncu",)))
    told = []
    page = live.live_profile(REQUEST, told.append)
    assert page.measured
    assert page.counters_missing == "ncu was not found"
    assert "install ncu" in as_text(page)
    assert [one.layer_time_us.source for one in page.tokens] == [Source.EVENT] * 2
    assert page.tokens[0].layer_time_us.value == 50.0  # the fifth launch: four parts, then the layer
    assert "timing 40 tokens" in told
    json.dumps(page.to_json(), allow_nan=False)


def test_the_live_page_carries_the_counters_that_were_read(no_gpu_calls, monkeypatch):
    def read(jobs, *, device_index):
        assert [job.tokens for job in jobs] == [1, 40]
        made = [KernelCounters(part=Part.DOWN, kernel="k", duration_ns=1e3, dram_read_bytes=5e3, dram_write_bytes=1e3)]
        return dict.fromkeys(jobs, made)

    monkeypatch.setattr(live, "blocked", lambda: None)
    monkeypatch.setattr(live, "read_counters", read)
    page = live.live_profile(REQUEST, lambda line: None)
    down = next(kernel for kernel in page.tokens[0].kernels if kernel.part is Part.DOWN)
    assert down.figures.bandwidth_gbps.value == 6.0
    assert page.counters_missing is None


def test_too_little_memory_shares_weights_and_says_so(no_gpu_calls, monkeypatch):
    monkeypatch.setattr(live, "blocked", lambda: Blocked("no counters", ()))
    monkeypatch.setattr(live, "resident_experts", lambda *_: 2)
    page = live.live_profile(REQUEST, lambda line: None)
    assert any("2 of 4 experts" in note for note in page.notes)
    assert [one.layer_time_us.source for one in page.tokens] == [Source.COMPOSED] * 2


def test_the_worker_notes_each_launch_in_order_and_how_each_job_ended(no_gpu_calls):
    bad = replace(CONFIG, structure=Structure.TMA_PERMUTE)
    jobs = [
        CounterJob(shape=SHAPE, tokens=1, plan=PLAN),
        CounterJob(shape=SHAPE, tokens=1, plan=LayerPlan(gate_up=CONFIG, down=bad)),  # down has no such structure
        CounterJob(shape=SHAPE, tokens=40, plan=PLAN, resident_experts=2),
    ]
    lines = notes_of(jobs, counters_worker.UnderNcu())
    first = [line for line in lines if line["job"] == 0]
    assert [line.get("part") for line in first] == ["routing", "gate_up", "down", "combine", None]
    assert first[1]["kernel"] == "gate_up_gather_kernel"
    assert first[-1] == {"job": 0, "done": True}
    assert "no structure tma_permute" in next(line for line in lines if line["job"] == 1)["failed"]
    assert lines[-1] == {"job": 2, "done": True}


def test_only_launches_of_the_layer_are_between_start_and_stop_one_range_a_job(no_gpu_calls, monkeypatch):
    """What else runs there (routing again, inputs, a warm-up) would be counted, and each of ncu's rows be one too late."""
    seen = []
    real = KernelCall.launch
    monkeypatch.setattr(KernelCall, "launch", lambda call: (seen.append(call.kernel.__name__), real(call)))
    profiler = counters_worker.torch.cuda.profiler
    monkeypatch.setattr(profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(profiler, "stop", lambda: seen.append("stop"))
    monkeypatch.setattr(counters_worker.torch.cuda, "synchronize", lambda: seen.append("wait"))
    jobs = [CounterJob(shape=SHAPE, tokens=tokens, plan=PLAN) for tokens in (1, 40)]
    counted = [line.get("kernel") for line in notes_of(jobs, counters_worker.UnderNcu())]
    ranges, inside = [], False
    for what in seen:
        if what == "start":
            ranges.append([])
        elif inside:
            ranges[-1].append(what)
        inside = what != "stop" and (inside or what == "start")
    assert [launch for one in ranges for launch in one[:-2]] == [kernel for kernel in counted if kernel]
    assert [one[-2:] for one in ranges] == [["wait", "stop"]] * 2  # stopped once all of it has run


def test_cuptis_worker_counts_each_launch_of_the_layer_by_itself_behind_a_flush(no_gpu_calls, monkeypatch):
    seen = []
    real = KernelCall.launch
    monkeypatch.setattr(KernelCall, "launch", lambda call: (seen.append(call.kernel.__name__), real(call)))
    timer = SimpleNamespace(cool=lambda: seen.append("flush"))
    monkeypatch.setattr(cupti_worker, "Timer", lambda *_: timer)
    monkeypatch.setattr(cupti_worker, "finish", lambda: seen.append("wait"))

    def count(launch, before):
        before()
        seen.append("start")
        launch()
        seen.append("stop")
        return {"gpu__time_duration.sum": float(len(seen))}

    worker = cupti_worker.ByCupti("GH100", ["gpu__time_duration.sum"], 1 << 20)
    worker._profiler = SimpleNamespace(count=count)
    jobs = [CounterJob(shape=SHAPE, tokens=tokens, plan=PLAN) for tokens in (1, 40)]
    lines = notes_of(jobs, worker)
    counted = [line["kernel"] for line in lines if "kernel" in line]
    around = [seen[place - 3 : place + 3] for place in range(len(seen)) if seen[place - 1] == "start"]
    assert around == [["flush", "wait", "start", kernel, "wait", "stop"] for kernel in counted]
    assert len({line["values"]["gpu__time_duration.sum"] for line in lines if "values" in line}) == len(counted)


def test_a_launch_that_fails_half_way_leaves_the_notes_of_those_before_it(no_gpu_calls, monkeypatch):
    jobs = [CounterJob(shape=SHAPE, tokens=1, plan=PLAN)]
    launched = []

    def launch(call):
        launched.append(call.kernel.__name__)
        if launched.count("down_gather_kernel") == 2:  # the first is the warm-up
            raise RuntimeError("no resources")
        real(call)

    real = KernelCall.launch
    monkeypatch.setattr(KernelCall, "launch", launch)
    lines = notes_of(jobs, counters_worker.UnderNcu())
    assert [line.get("part") for line in lines] == ["routing", "gate_up", None]  # as many as ncu has rows
    assert "no resources" in lines[-1]["failed"]


def test_a_profile_under_another_routing_counts_its_experts_and_says_so(no_gpu_calls, monkeypatch):
    monkeypatch.setattr(live, "blocked", lambda: Blocked("no counters", ()))
    page = live.live_profile(replace(REQUEST, routing=Zipf(8.0)), lambda line: None)
    assert any("zipf:8.0 routing" in note for note in page.notes)
    assert [one.touched_experts for one in page.tokens][-1] < SHAPE.local_experts
