"""Jobs, ncu's rows and the worker's notes come together; every way to fail is one sentence. No ncu runs here."""

from __future__ import annotations

import json
import os
import stat
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.measure import counter_rights, counters, ncu
from moetune.measure.counter_names import MetricSet
from moetune.measure.counters import CounterJob, KernelCounters, assign, read_counters, set_metrics
from moetune.measure.counters_run import Counted
from moetune.measure.ncu import NcuRun, explain
from moetune.measure.ncu_csv import parse
from moetune.measure.parts import Part
from moetune.models.routing import Hot, Trace, Zipf
from moetune.outcome import Failed, FailureKind
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
PLAN = LayerPlan(gate_up=CONFIG, down=CONFIG)
SHAPE = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
JOBS = [CounterJob(shape=SHAPE, tokens=tokens, plan=PLAN) for tokens in (1, 64)]
NAMES = {
    "duration_ns": "gpu__time_duration.sum",
    "issue_active_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
}


def row(kernel, duration="1,000", issue="12.5"):
    return f'"0","{kernel}","{duration}","{issue}"'


def run(*rows, before="", printed=""):
    head = '"ID","Kernel Name",' + ",".join(f'"{name}"' for name in NAMES.values())
    return NcuRun(log="\n".join([before, head, '"","","ns","%"', *rows]), printed=printed, exit_code=0)


def counted(notes, ended):
    return Counted(title="ncu", launches=notes, rows=parse(ended.log), lack=explain(ended), seconds={})


def launch(job, part, kernel):
    return {"job": job, "part": part, "kernel": kernel}


def test_rows_go_to_the_launches_in_order_and_strangers_are_skipped():
    notes = [
        launch(0, "routing", "route_order_kernel"),
        launch(0, "gate_up", "gate_up_gather_kernel"),
        {"job": 0, "done": True},
        launch(1, "gate_up", "gate_up_gather_kernel"),
        {"job": 1, "done": True},
    ]
    rows = [
        row("route_order_kernel", "2,000"),
        row("vectorized_elementwise_kernel"),
        row("gate_up_gather_kernel", "7"),
        row("gate_up_gather_kernel", "9"),
    ]
    found = assign(JOBS, counted(notes, run(*rows)), NAMES)
    assert [(kernel.part, kernel.duration_ns) for kernel in found[JOBS[0]]] == [
        (Part.ROUTING, 2000.0),
        (Part.GATE_UP, 7.0),
    ]
    assert [(kernel.part, kernel.duration_ns) for kernel in found[JOBS[1]]] == [(Part.GATE_UP, 9.0)]


def test_a_job_that_failed_half_way_does_not_shift_the_rows_of_the_next():
    notes = [
        launch(0, "gate_up", "gate_up_gather_kernel"),
        {"job": 0, "failed": "out of memory"},
        launch(1, "gate_up", "gate_up_gather_kernel"),
        {"job": 1, "done": True},
    ]
    ended = run(row("gate_up_gather_kernel", "7"), row("gate_up_gather_kernel", "9"))
    found = assign(JOBS, counted(notes, ended), NAMES)
    assert found[JOBS[0]] == Failed(FailureKind.RESOURCES, "out of memory")
    assert found[JOBS[1]][0].duration_ns == 9.0


@pytest.mark.parametrize(
    ("notes", "says"),
    [
        ([launch(0, "gate_up", "k"), launch(0, "down", "d"), {"job": 0, "done": True}], "1 of 2 launches"),
        ([launch(0, "gate_up", "k")], "boom"),
        ([], "boom"),
    ],
    ids=["ncu-lost-a-row", "worker-died", "worker-wrote-nothing"],
)
def test_an_incomplete_job_is_a_failure_never_half_a_layer(notes, says):
    found = assign(JOBS[:1], counted(notes, run(row("k"), printed="RuntimeError: boom")), NAMES)
    assert isinstance(found[JOBS[0]], Failed)
    assert says in found[JOBS[0]].reason


@pytest.mark.parametrize(
    ("log", "printed", "says"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access …", "", "ERR_NVGPUCTRPERM"),
        ("==ERROR== Profiling failed because a driver resource was unavailable.", "", "dcgmi profile --pause"),
        ("==ERROR== Failed to find metric regex:^sm__nothing$", "", "Failed to find metric"),
        (
            "==ERROR== The application returned an error code (1).",
            "torch.OutOfMemoryError: CUDA out of memory",
            "out of memory",
        ),
        ("", "", "no output"),
    ],
    ids=["permission", "busy", "metric", "application", "silence"],
)
def test_ncu_failures_are_one_sentence(log, printed, says):
    failed = explain(NcuRun(log=log, printed=printed, exit_code=1))
    assert says in failed.reason
    assert "\n" not in failed.reason


def test_a_mig_slice_is_asked_only_for_its_own_units():
    whole = set_metrics(SHAPE.format, MetricSet.MAIN, TARGETS["sm_90"])
    slice_ = set_metrics(
        SHAPE.format, MetricSet.MAIN, type(TARGETS["sm_90"]).from_json(TARGETS["sm_90"].to_json() | {"mig": "1g.18gb"})
    )
    assert "dram_read_bytes" in whole
    assert "dram_read_bytes" not in slice_
    assert "issue_active_percent" in slice_


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Put a script named ncu on PATH; the body sees its arguments as ``args`` and the log file as ``log``."""

    def install(body: str):
        script = tmp_path / "ncu"
        head = f"#!{sys.executable}\nimport sys, json, time\nargs = sys.argv[1:]\nlog = args[args.index('--log-file') + 1]\n"
        script.write_text(head + textwrap.dedent(body))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(ncu, "blocked", lambda: None)
        monkeypatch.setattr(counters, "device_info", lambda index: TARGETS["sm_90"])

    return install


def test_two_sets_are_read_in_two_runs_and_joined_launch_by_launch(fake_ncu):
    fake_ncu(
        """
        metrics = args[args.index('--metrics') + 1].split(',')
        assert '--profile-from-start' in args and args[args.index('--clock-control') + 1] == 'none'
        jobs = json.load(open(args[-2]))['jobs']
        with open(args[-1], 'w') as notes, open(log, 'w') as out:
            print('"ID","Kernel Name",' + ','.join(f'"{m}"' for m in metrics), file=out)
            print('"",""' + ',""' * len(metrics), file=out)
            for index, job in enumerate(jobs):
                for part, kernel in (('gate_up', 'g'), ('down', 'd')):
                    print(json.dumps({'job': index, 'part': part, 'kernel': kernel}), file=notes)
                    print(f'"0","{kernel}"' + ',"5"' * len(metrics), file=out)
                print(json.dumps({'job': index, 'done': True}), file=notes)
        """
    )
    found = read_counters(JOBS)
    assert list(found) == JOBS
    for kernels in found.values():
        assert [kernel.part for kernel in kernels] == [Part.GATE_UP, Part.DOWN]
        assert kernels[0].dram_bytes == 10.0  # from the main set
        assert kernels[0].tensor_percent == 5.0  # from the tensor set
        assert kernels[0].tensor_flops == 10.0  # HGMMA + HMMA


def test_a_hanging_ncu_is_stopped_at_the_limit_with_all_its_children(fake_ncu, tmp_path):
    child = tmp_path / "child.pid"
    fake_ncu(
        f"""
        import subprocess
        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
        open({str(child)!r}, 'w').write(str(child.pid))
        time.sleep(600)
        """
    )
    found = read_counters(JOBS, sets=(MetricSet.HEADLINE,), time_limit_s=2.0)
    assert {outcome.kind for outcome in found.values()} == {FailureKind.TIMEOUT}
    state = Path(f"/proc/{child.read_text()}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_failing_second_set_leaves_the_first(fake_ncu):
    fake_ncu(
        """
        metrics = args[args.index('--metrics') + 1].split(',')
        if any('pipe_tensor' in m for m in metrics):
            open(log, 'w').write('==ERROR== Failed to find metric\\n')
            raise SystemExit(1)
        open(args[-1], 'w').write(json.dumps({'job': 0, 'part': 'gate_up', 'kernel': 'g'}) + '\\n' + json.dumps({'job': 0, 'done': True}) + '\\n')
        open(log, 'w').write('"Kernel Name",' + ','.join(f'"{m}"' for m in metrics) + '\\n""' + ',""' * len(metrics) + '\\n"g"' + ',"5"' * len(metrics) + '\\n')
        """
    )
    (kernels,) = read_counters(JOBS[:1]).values()
    assert kernels[0].duration_ns == 5.0
    assert kernels[0].tensor_percent is None


def test_without_permission_nothing_is_started(monkeypatch):
    monkeypatch.setattr(
        ncu,
        "blocked",
        lambda: counter_rights.Blocked("the driver lets only administrators read counters", counter_rights.UNLOCK),
    )
    monkeypatch.setattr(counters, "CountersRun", lambda *_: pytest.fail("ncu was started"))
    assert read_counters(JOBS) == dict.fromkeys(
        JOBS, Failed(FailureKind.RESOURCES, "the driver lets only administrators read counters")
    )


@pytest.mark.parametrize(
    ("params", "capabilities", "forbidden"),
    [
        ("RmProfilingAdminOnly: 1\n", "0000000000000000", True),
        ("RmProfilingAdminOnly: 1\n", "000001ffffffffff", False),
        ("RmProfilingAdminOnly: 1\n", "00000000a80425fb", True),  # root of a plain container: no SYS_ADMIN
        ("RmProfilingAdminOnly: 0\n", "0000000000000000", False),
        ("", "0000000000000000", False),
    ],
    ids=["user", "root", "container-root", "open-to-all", "hidden"],
)
def test_permission_is_read_from_the_driver_and_the_process(tmp_path, monkeypatch, params, capabilities, forbidden):
    (tmp_path / "params").write_text(params)
    (tmp_path / "status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(counter_rights, "_DRIVER_PARAMS", tmp_path / "params")
    monkeypatch.setattr(counter_rights, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(counter_rights, "_has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(ncu, "find_ncu", lambda: "/usr/bin/ncu")
    found = ncu.blocked()
    assert (found is not None) is forbidden
    if found is not None:
        assert any("NVreg_RestrictProfilingToAdminUsers=0" in line for line in found.fixes)


def test_a_machine_without_a_gpu_is_told_so_before_it_is_told_to_install_ncu(monkeypatch):
    monkeypatch.setattr(counter_rights, "_has_nvidia_gpu", lambda: False)
    assert "no NVIDIA GPU" in counters.counters_unavailable()


def test_a_job_survives_json_with_the_models_expert_count():
    job = CounterJob(shape=replace(SHAPE, experts=64), tokens=3, plan=PLAN, resident_experts=2)
    again = CounterJob.from_json(json.loads(json.dumps(job.to_json())))
    assert again == job
    assert again.shape.experts == 64  # not part of equality


@pytest.mark.parametrize("routing", [Zipf(1.3), Hot(), Trace("0123456789abcdef", Path("/nowhere/t.npz"))])
def test_a_job_survives_json_with_its_routing(routing):
    job = CounterJob(shape=SHAPE, tokens=3, plan=PLAN, routing=routing)
    again = CounterJob.from_json(json.loads(json.dumps(job.to_json())))
    assert again == job
    assert again.routing.option == routing.option
    assert again != CounterJob(shape=SHAPE, tokens=3, plan=PLAN)


def test_what_was_not_counted_is_none_not_zero():
    kernel = KernelCounters(part=Part.DOWN, kernel="k", dram_read_bytes=1.0)
    assert kernel.dram_bytes is None
    assert kernel.tensor_flops is None
    assert kernel.dram_peak_bytes_per_s is None
    assert kernel.to_json() == {"part": "down", "kernel": "k", "dram_read_bytes": 1.0}
