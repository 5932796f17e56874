"""What the process that calls CUPTI does with its jobs, on a GPU of nothing: flushes, launches, notes, and refusals."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from moetune.measure.counter_names import LAUNCH, Chip, MetricSet, metrics
from moetune.measure.counter_rights import CountersRefusedError
from moetune.measure.counter_ways import CUPTI
from moetune.measure.counters import CounterJob, assign
from moetune.measure.counters_run import Counted
from moetune.measure.cupti.host import HostProfiler
from moetune.measure.cupti.library import load as load_real
from moetune.measure.figures import counted
from moetune.measure.leashed import Ended
from moetune.measure.ncu_csv import parse, unit_scale
from moetune.measure.parts import Part
from moetune.models.roofline import layer_work
from moetune.outcome import Failed, FailureKind
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape, WeightFormat

counter_jobs = pytest.importorskip("moetune.measure.counter_jobs", reason="needs torch and triton")
cupti_worker = pytest.importorskip("moetune.measure.cupti_worker", reason="needs torch and triton")

CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
SHAPE = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
JOBS = [CounterJob(shape=SHAPE, tokens=tokens, plan=LayerPlan(gate_up=CONFIG, down=CONFIG)) for tokens in (1, 64)]
NAMES = CUPTI.readable(metrics(Chip.GH100, WeightFormat.BF16, MetricSet.HEADLINE))
METRICS = list(NAMES.values())
L2_BYTES = 60 << 20

# What ncu prints with --print-units base for each unit that CUPTI knows: both must mean the same number.
BASE_UNITS = {"nanosecond": "ns", "byte": "byte", "percent": "%", "gpc_cycle": "cycle", "math_op": ""}


class Kernel:
    """A kernel and its launch as one: it runs for ``size`` and can be told to fail."""

    def __init__(self, fake, name, size, fails=None):
        self.fake, self.kernel, self.size, self.fails = fake, SimpleNamespace(__name__=name), size, fails
        self.launches = 0

    def launch(self):
        self.launches += 1
        if self.fails is not None and self.launches > 1:
            raise self.fails
        self.fake.launch(self.size)


@pytest.fixture
def gpu(monkeypatch, fake):
    """Everything that the worker asks of torch, played on the fake: ``gpu.layers`` are the kernels of each job."""
    told = SimpleNamespace(layers=[], flushed=0, finished=0)

    class Timer:
        def __init__(self, device, l2_bytes):
            assert l2_bytes == L2_BYTES

        def cool(self):
            assert not fake.library.fake_is_counting(), "the flush would be counted"
            told.flushed += 1
            fake.launch(12345.0)

    def finish():
        told.finished += 1

    layers = iter(told.layers)
    monkeypatch.setattr(counter_jobs, "layer_parts", lambda *_: SimpleNamespace(calls=next(layers)))
    monkeypatch.setattr(counter_jobs, "resident_weights", lambda *_: "weights")
    monkeypatch.setattr(counter_jobs, "router_of", lambda *_: "router")
    monkeypatch.setattr(counter_jobs, "finish", finish)
    monkeypatch.setattr(counter_jobs, "load", lambda: None)
    for name in ("set_device", "synchronize", "empty_cache"):
        monkeypatch.setattr(counter_jobs.torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(counter_jobs.triton.runtime, "driver", SimpleNamespace(active=None))
    monkeypatch.setattr(cupti_worker.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cupti_worker, "finish", finish)
    monkeypatch.setattr(cupti_worker, "Timer", Timer)
    monkeypatch.setattr(cupti_worker.gpu_driver, "opened", lambda: fake.library)
    monkeypatch.setattr(cupti_worker.library, "load", lambda: fake.cupti)
    return told


def two_layers(fake, fails=None):
    big, small = (100.0, "gate_up_gather_kernel"), (2.0, "combine_kernel")
    return [
        [(Part.GATE_UP, Kernel(fake, big[1], big[0])), (Part.COMBINE, Kernel(fake, small[1], small[0], fails))],
        [(Part.GATE_UP, Kernel(fake, big[1], 3 * big[0])), (Part.COMBINE, Kernel(fake, small[1], 3 * small[0]))],
    ]


def counting(metrics=METRICS):
    return cupti_worker.ByCupti("GH100", metrics, L2_BYTES)


def served(tmp_path, worker):
    """Have the worker serve JOBS in ``tmp_path`` and return its notes."""
    request = {"device_index": 0, "jobs": [job.to_json() for job in JOBS]}
    (tmp_path / "jobs").write_text(json.dumps(request))
    counter_jobs.serve(0.0, tmp_path / "jobs", tmp_path / "launches", worker)
    return [json.loads(line) for line in (tmp_path / "launches").read_text().splitlines()]


def ran(worker):
    """Have a worker that has loaded run JOBS and return its notes."""
    notes, request = io.StringIO(), {"device_index": 0, "jobs": [job.to_json() for job in JOBS]}
    counter_jobs.run(request, notes, worker, counter_jobs.Phases())
    return [json.loads(line) for line in notes.getvalue().splitlines()]


def as_counted(notes):
    lack = CUPTI.explain(Ended("", 0), notes, None)
    launches = [note for note in notes if "job" in note]
    return Counted(title="CUPTI", launches=launches, rows=CUPTI.rows(notes, None), lack=lack, seconds={})


def test_each_launch_is_noted_with_its_own_values_behind_a_flush_that_is_not_counted(gpu, fake, tmp_path):
    gpu.layers += two_layers(fake)
    fake.library.fake_sessions(1)
    notes = served(tmp_path, counting())
    found = assign(JOBS, as_counted(notes), NAMES)
    place = METRICS.index(NAMES["duration_ns"]) + 1  # the fake multiplies by a metric's place
    assert [[launch.duration_ns for launch in found[job]] for job in JOBS] == [
        [100.0 * place, 2.0 * place],
        [300.0 * place, 6.0 * place],
    ]
    assert [launch.part for launch in found[JOBS[0]]] == [Part.GATE_UP, Part.COMBINE]
    assert {launch.passes for launch in found[JOBS[0]]} == {1}
    assert gpu.flushed == 4
    assert [kernel.launches for layer in gpu.layers for _, kernel in layer] == [2, 2, 2, 2]  # once before it counts
    seconds = notes[-1]["seconds"]
    phases = {"load", "start CUDA", "get ready", "weights", "first launches", "profiled launches", "flushes"}
    assert phases | {"cuptiRangeProfilerSetConfig", "cuptiRangeProfilerDecodeData"} <= set(seconds)
    assert all(value >= 0 for value in seconds.values())


def test_the_command_that_starts_the_worker_is_the_one_that_it_understands(gpu, fake, tmp_path, monkeypatch):
    gpu.layers += two_layers(fake)
    (tmp_path / "jobs").write_text(json.dumps({"device_index": 0, "jobs": [job.to_json() for job in JOBS]}))
    device = replace(TARGETS["sm_90"], l2_bytes=L2_BYTES)
    arguments = ["0.0", str(tmp_path / "jobs"), str(tmp_path / "launches")]
    command = CUPTI.command(METRICS, device, tmp_path, arguments)
    ends = []
    monkeypatch.setattr(cupti_worker.os, "_exit", ends.append)
    monkeypatch.setattr(cupti_worker.sys, "argv", command[command.index(cupti_worker.__name__) :])
    cupti_worker.main()
    notes = [json.loads(line) for line in (tmp_path / "launches").read_text().splitlines()]
    assert [set(note["values"]) for note in notes if "values" in note] == [set(METRICS)] * 4
    assert ends == [0]
    assert fake.notes[-1] == "cuptiProfilerDeInitialize"


def test_the_profiler_is_opened_once_however_often_it_is_told_to_begin(gpu, fake):
    gpu.layers += two_layers(fake)
    worker = counting()
    worker.load()
    counter_jobs.start_cuda(0, worker)
    assert fake.notes.count("cuptiRangeProfilerEnable") == 1
    assert sum("values" in note for note in ran(worker)) == 4
    assert fake.notes.count("cuptiRangeProfilerEnable") == 1
    worker.close()
    assert fake.notes[-3:] == [
        "cuptiRangeProfilerDisable",
        "cuptiProfilerHostDeinitialize",
        "cuptiProfilerDeInitialize",
    ]


def test_where_beginning_ahead_fails_the_first_job_tries_again(gpu, fake):
    gpu.layers += two_layers(fake)
    worker = counting()
    worker.load()
    fake.plant("cuptiRangeProfilerEnable", 26)
    counter_jobs.start_cuda(0, worker)  # the GPU is still somebody's
    assert fake.notes.count("cuptiRangeProfilerEnable") == 1
    fake.plant("", 0)
    notes = ran(worker)
    assert sum("values" in note for note in notes) == 4


@pytest.mark.parametrize(
    ("function", "after", "launches"),
    [
        ("cuptiProfilerHostInitialize", 0, None),
        ("cuptiRangeProfilerEnable", 0, 0),
        ("cuptiRangeProfilerSetConfig", 0, 0),
        ("cuptiRangeProfilerDecodeData", 1, 1),
    ],
    ids=["while-it-loads", "as-it-begins", "at-the-first-launch", "at-the-second-launch"],
)
def test_a_refusal_ends_the_work_with_one_note_that_says_why(gpu, fake, tmp_path, function, after, launches):
    gpu.layers += two_layers(fake)
    fake.plant(function, 35, after)
    notes = served(tmp_path, counting())
    refused = f"the NVIDIA driver forbids reading counters ({function}: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES)"
    assert notes[-1] == {"refused": refused}
    assert sum("values" in note for note in notes) == (launches or 0)
    assert not any("failed" in note or "done" in note for note in notes)
    found = assign(JOBS, as_counted(notes), NAMES)
    assert found[JOBS[1]] == Failed(FailureKind.RESOURCES, refused)
    assert isinstance(found[JOBS[0]], Failed)
    assert refused in found[JOBS[0]].reason


def test_metrics_that_need_two_passes_are_refused_before_there_is_a_gpu(gpu, fake, tmp_path):
    fake.rules(passes=2)
    assert served(tmp_path, counting()) == [{"refused": "the metrics need 2 passes over a kernel of a GH100, not one"}]
    assert "cuptiProfilerInitialize" not in fake.notes


def test_a_job_that_fails_by_itself_costs_that_job_alone(gpu, fake, tmp_path):
    gpu.layers += two_layers(fake, fails=MemoryError("no room"))
    found = assign(JOBS, as_counted(served(tmp_path, counting())), NAMES)
    assert "no room" in found[JOBS[0]].reason
    assert len(found[JOBS[1]]) == 2


def test_a_lost_device_ends_the_work(gpu, fake):
    gpu.layers += two_layers(fake, fails=RuntimeError("CUDA error: misaligned address"))
    worker, notes = counting(), io.StringIO()
    worker.load()
    request = {"device_index": 0, "jobs": [job.to_json() for job in JOBS]}
    with pytest.raises(RuntimeError, match="misaligned"):
        counter_jobs.run(request, notes, worker, counter_jobs.Phases())
    assert "misaligned" in json.loads(notes.getvalue().splitlines()[-1])["failed"]


def test_the_driver_that_does_not_answer_is_a_refusal(gpu, monkeypatch):
    def gone():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cupti_worker.gpu_driver, "opened", gone)
    worker = counting()
    worker.load()
    with pytest.raises(CountersRefusedError, match="driver does not answer"):
        worker.begin()


@pytest.mark.parametrize("weights", WeightFormat, ids=lambda weights: weights.value)
@pytest.mark.parametrize("chip", Chip, ids=lambda chip: chip.value)
def test_cuptis_units_are_those_that_ncu_prints_in_base_units(chip, weights):
    """So a value needs no scaling, whoever read it; the unit is CUPTI's own word for each metric that a sweep reads."""
    names = CUPTI.readable(metrics(chip, weights, MetricSet.HEADLINE))
    with HostProfiler(load_real(), chip.value) as host:
        units = {field: host.describe(metric).unit for field, metric in names.items()}
    assert set(units.values()) <= set(BASE_UNITS), units
    assert {unit_scale(BASE_UNITS[unit]) for unit in units.values()} == {1.0}


def test_both_ways_give_the_same_figures_for_the_same_counts(gpu, fake, tmp_path):
    """The same launch, once as CUPTI's worker notes it and once as ncu prints it: all fields of the set, and the figures."""
    gpu.layers += two_layers(fake)
    by_cupti = assign(JOBS, as_counted(served(tmp_path, counting())), NAMES)[JOBS[0]]
    with HostProfiler(load_real(), "GH100") as host:
        units = [BASE_UNITS[host.describe(metric).unit] for metric in METRICS]
    rows = [
        ["Kernel Name", *METRICS, *LAUNCH.values()],
        ["", *units, *("" for _ in LAUNCH)],
        *(
            [f"{name}(int)", *(f"{size * (place + 1):,.2f}" for place in range(len(METRICS))), *("1" for _ in LAUNCH)]
            for name, size in (("gate_up_gather_kernel", 100.0), ("combine_kernel", 2.0))
        ),
    ]
    log = "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)
    launches = [{"job": 0, "part": "gate_up", "kernel": "gate_up_gather_kernel"}]
    launches += [{"job": 0, "part": "combine", "kernel": "combine_kernel"}, {"job": 0, "done": True}]
    lack = Failed(FailureKind.LAUNCH, "none")
    ncus = Counted(title="ncu", launches=launches, rows=parse(log), lack=lack, seconds={})
    names = metrics(Chip.GH100, WeightFormat.BF16, MetricSet.HEADLINE)
    by_ncu = assign(JOBS[:1], ncus, names)[JOBS[0]]
    facts = set(LAUNCH) | {"passes"}
    for one, two in zip(by_cupti, by_ncu, strict=True):
        assert one.to_json() == {name: value for name, value in two.to_json().items() if name not in facts} | {
            "passes": 1
        }
        assert set(NAMES) <= set(one.to_json())
    work = layer_work(SHAPE, 1)
    assert counted(by_cupti, work) == counted(by_ncu, work)
    assert counted(by_cupti, work).bandwidth_gbps.value is not None
