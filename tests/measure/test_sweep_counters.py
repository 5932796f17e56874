"""A sweep's counters come from CUPTI, and from ncu where CUPTI fails: once, and the figures say so. Neither runs here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_ncu import assert_counted, assert_nothing_left, processes, starts, until

from moetune.measure import counter_rights, counter_ways, sweep_counters
from moetune.measure.counter_rights import Blocked
from moetune.measure.counter_ways import CUPTI, CUPTI_WORKER, NCU, NCU_WORKER
from moetune.measure.sweep_counters import CUPTI_FIRST, SweepCounters
from moetune.outcome import FailureKind
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.device import TARGETS, DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
PLANS = {tokens: LayerPlan(gate_up=CONFIG, down=CONFIG) for tokens in (1, 64)}
SHAPE = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
DEVICE = TARGETS["sm_90"]
COUNTS = "wait()\ncount(5)"
FAILS = "wait()\nlaunches.touch()\nprint('ncu is out of order', flush=True)\nsys.exit(1)"
TUNER = """
import sys, time
from moetune.measure import counter_rights
from moetune.measure.sweep_counters import CUPTI_FIRST, SweepCounters
from moetune_kernels.device import TARGETS
from moetune_kernels.shape import MoEShape
counter_rights.forbidden = lambda: None
reader = SweepCounters(MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2), 0, ways=CUPTI_FIRST)
reader.prepare(TARGETS["sm_90"])
print("prepared", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _allowed(monkeypatch):
    monkeypatch.setattr(counter_rights, "forbidden", lambda: None)


@pytest.fixture
def cupti(monkeypatch):
    """Plant a worker that does what it is told."""

    def plant(deed):
        monkeypatch.setattr(counter_ways, "CUPTI_WORKER", "planted_cupti")
        monkeypatch.setenv("PLANTED_CUPTI", deed)
        here = str(Path(__file__).parent)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH")))))

    return plant


@pytest.fixture
def reader():
    made = SweepCounters(SHAPE, 0, ways=CUPTI_FIRST)
    yield made
    made.close()


def read(reader, limit_s=40.0, device=DEVICE):
    return reader.read(PLANS, device, limit_s, lambda: None)


def cupti_starts(tmp_path):
    path = tmp_path / "cupti_starts"
    return len(path.read_text().split()) if path.exists() else 0


def notes_of(figures):
    """Return what is said of the three figures, each note once."""
    return {figure.reason for figure in (figures.bandwidth_gbps, figures.issue_efficiency)}


@pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "ahead"])
def test_where_cupti_counts_ncu_is_not_started(fake_ncu, cupti, reader, tmp_path, ahead):
    fake_ncu(COUNTS)
    cupti("count")
    if ahead:
        reader.prepare(DEVICE)
        reader.prepare(DEVICE)
        assert until(lambda: cupti_starts(tmp_path) == 1)
    found = read(reader)
    assert_counted(found)
    assert {figures.issue_efficiency.value for figures in found.values()} == {0.07}  # percent: the planted 7
    assert [notes_of(figures) for figures in found.values()] == [{None}, {None}]
    assert (cupti_starts(tmp_path), starts(tmp_path)) == (1, 0)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "ahead"])
@pytest.mark.parametrize(
    ("deed", "begun", "says"),
    [
        ("refuse", 1, "CUPTI: CUPTI listed 1 of 1 launches; the CUPTI of this test is shy"),
        ("refuse-early", 1, "CUPTI: the CUPTI of this test is shy"),
        ("crash", 1, "CUPTI: CUPTI listed 1 of 1 launches; the worker that calls CUPTI ended with exit code 134"),
        (
            "die-early",
            None,
            "CUPTI: the worker that calls CUPTI ended with exit code 1 and no counters: Segmentation fault",
        ),
    ],
)
def test_where_cupti_fails_ncu_is_started_once_and_the_figures_say_why(
    fake_ncu, cupti, reader, tmp_path, deed, begun, says, ahead
):
    fake_ncu(COUNTS)
    cupti(deed)
    if ahead:
        reader.prepare(DEVICE)
        assert until(lambda: cupti_starts(tmp_path) == 1)
        if deed == "die-early":
            assert until(lambda: not processes(tmp_path))
    found = read(reader)
    assert_counted(found)
    (note,) = notes_of(found[1])
    assert note.startswith(f"read by ncu, because {says}")
    assert "\n" not in note
    assert found[1].flops_per_byte.reason.endswith(note)
    # One that ended before its jobs came may have been unlucky: it is replaced once, as ncu is.
    assert cupti_starts(tmp_path) == (begun or 1 + ahead)
    assert starts(tmp_path) == 1
    assert_nothing_left(tmp_path)


def test_what_cupti_has_counted_stays_and_ncu_reads_the_rest(fake_ncu, cupti, reader, tmp_path):
    fake_ncu(COUNTS)
    cupti("half")
    found = read(reader)
    assert_counted(found)
    assert notes_of(found[1]) == {None}
    assert found[1].issue_efficiency.value == 0.07
    assert notes_of(found[64]) == {"read by ncu, because CUPTI: the CUPTI of this test tires soon"}
    assert found[64].issue_efficiency.value == 0.05
    assert starts(tmp_path) == 1


@pytest.mark.parametrize(("name", "value"), [("_SHARE", 0.05), ("_TURN_S", 2.0)])
def test_a_cupti_that_hangs_is_stopped_in_time_for_ncu(fake_ncu, cupti, reader, tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(sweep_counters, name, value)
    fake_ncu(COUNTS)
    cupti("hang")
    found = read(reader, limit_s=40.0)
    assert_counted(found)
    assert notes_of(found[1]) == {"read by ncu, because CUPTI: CUPTI did not finish within 2 s and was stopped"}
    assert (cupti_starts(tmp_path), starts(tmp_path)) == (1, 1)
    assert_nothing_left(tmp_path)


def test_where_no_time_is_left_ncu_is_not_begun(fake_ncu, cupti, reader, tmp_path):
    fake_ncu(COUNTS)
    cupti("hang")
    found = read(reader, limit_s=2.0)
    assert {outcome.kind for outcome in found.values()} == {FailureKind.TIMEOUT}
    assert {outcome.reason for outcome in found.values()} == {"CUPTI did not finish within 1 s and was stopped"}
    assert starts(tmp_path) == 0


def test_where_both_fail_each_says_why_in_one_sentence(fake_ncu, cupti, reader, tmp_path):
    fake_ncu(FAILS)
    cupti("refuse-early")
    found = read(reader)
    assert {outcome.reason for outcome in found.values()} == {
        "CUPTI: the CUPTI of this test is shy; ncu: ncu ended with exit code 1 and no counters: ncu is out of order"
    }
    assert (cupti_starts(tmp_path), starts(tmp_path)) == (1, 1)


def test_without_a_library_ncu_is_started_ahead(fake_ncu, reader, tmp_path, monkeypatch):
    monkeypatch.setattr(counter_ways.library, "find", lambda: None)
    fake_ncu(COUNTS)
    reader.prepare(DEVICE)
    assert until(lambda: starts(tmp_path) == 1)
    found = read(reader)
    assert_counted(found)
    assert notes_of(found[1]) == {"read by ncu, because CUPTI: no libcupti is installed"}
    assert starts(tmp_path) == 1


def test_a_mig_slice_is_read_by_ncu_as_before(fake_ncu, cupti, reader, tmp_path):
    fake_ncu(COUNTS)
    cupti("count")
    slice_ = DeviceInfo.from_json(DEVICE.to_json() | {"mig": "1g.18gb"})
    reader.prepare(slice_)
    found = read(reader, device=slice_)
    assert notes_of(found[1]) >= {"read by ncu, because CUPTI: CUPTI's range profiler is not used on a MIG slice"}
    assert (cupti_starts(tmp_path), starts(tmp_path)) == (0, 1)


def test_on_a_chip_without_names_nothing_is_started_and_one_sentence_says_so(fake_ncu, cupti, reader, tmp_path):
    fake_ncu(COUNTS)
    cupti("count")
    unknown = DeviceInfo.from_json(DEVICE.to_json() | {"sm": 75, "name": "NVIDIA T4"})
    reader.prepare(unknown)
    found = read(reader, device=unknown)
    assert {outcome.reason for outcome in found.values()} == {
        "no counter names are known for NVIDIA T4 (compute capability 7.5)"
    }
    assert (cupti_starts(tmp_path), starts(tmp_path)) == (0, 0)


def test_what_forbids_both_is_said_once(fake_ncu, cupti, reader, tmp_path, monkeypatch):
    why = Blocked("only administrators may read counters")
    monkeypatch.setattr(counter_rights, "forbidden", lambda: why)
    monkeypatch.setattr("moetune.measure.ncu.blocked", lambda: why)
    fake_ncu(COUNTS)
    cupti("count")
    reader.prepare(DEVICE)
    assert {outcome.reason for outcome in read(reader).values()} == {why.reason}
    assert (cupti_starts(tmp_path), starts(tmp_path)) == (0, 0)


@pytest.mark.parametrize(("ways", "counts"), [((NCU,), (0, 1)), ((CUPTI,), (1, 0))], ids=["ncu", "cupti"])
def test_one_way_can_be_forced(fake_ncu, cupti, tmp_path, ways, counts):
    fake_ncu(COUNTS)
    cupti("count")
    reader = SweepCounters(SHAPE, 0, ways=ways)
    assert_counted(read(reader))
    assert (cupti_starts(tmp_path), starts(tmp_path)) == counts


def test_a_forced_way_that_fails_is_replaced_by_nothing_and_says_why_without_its_name(fake_ncu, cupti, tmp_path):
    fake_ncu(COUNTS)
    cupti("refuse-early")
    found = read(SweepCounters(SHAPE, 0, ways=(CUPTI,)))
    assert {outcome.reason for outcome in found.values()} == {"the CUPTI of this test is shy"}
    assert starts(tmp_path) == 0


def test_a_worker_that_waits_ends_with_its_reader(fake_ncu, reader, tmp_path):
    """The real one, which loads torch and CUPTI and then waits."""
    fake_ncu(COUNTS)
    reader.prepare(DEVICE)
    assert until(lambda: any(CUPTI_WORKER.encode() in line for line in processes(tmp_path)))
    assert not until(lambda: not processes(tmp_path), 6.0), "it does not wait"
    reader.close()
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("waits_s", [0.0, 4.0], ids=["while-it-loads", "while-it-waits"])
def test_a_killed_tuner_leaves_no_worker_behind(fake_ncu, tmp_path, waits_s):
    fake_ncu(COUNTS)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with subprocess.Popen(
        [sys.executable, "-c", TUNER], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    ) as tuner:
        try:
            assert tuner.stdout.readline() == b"prepared\n"
            assert until(lambda: any(CUPTI_WORKER.encode() in line for line in processes(tmp_path)))
            assert not until(lambda: not processes(tmp_path), waits_s)
        finally:
            tuner.send_signal(signal.SIGKILL)
        tuner.wait()
        assert_nothing_left(tmp_path)


def test_the_real_worker_on_a_machine_without_a_gpu_gives_way_to_ncu(fake_ncu, reader, tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here: tests/gpu/test_cupti.py")
    fake_ncu(COUNTS)
    reader.prepare(DEVICE)
    found = read(reader)
    assert_counted(found)
    (note,) = notes_of(found[1])
    assert note.startswith("read by ncu, because CUPTI: the worker that calls CUPTI ended with exit code 1")
    assert starts(tmp_path) == 1
    assert not [line for line in processes(tmp_path) if NCU_WORKER.encode() in line]
