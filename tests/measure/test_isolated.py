"""Whatever a candidate does to the GPU process costs that candidate, and the next one is answered by another process."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time

import planted_gpu
import pytest
from planted_gpu import DEVICE, SHAPE, STICKY, Deed

from moetune.engine.backend import compiled_now
from moetune.errors import MissingError, RunError
from moetune.measure import gpu_messages, gpu_process, gpu_respawn
from moetune.measure.counters import SWEEP_SETS, CounterJob
from moetune.models.routing import UNIFORM
from moetune.outcome import Failed, FailureKind, Measured, Source
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.plan import LayerPlan

SIX = [
    MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=block_n, block_k=block_k)
    for block_n in (32, 64, 128)
    for block_k in (64, 128)
]
BAD = SIX[2]
GOOD = [config for config in SIX if config != BAD]


def impatient(method, arguments, tokens):
    return 30.0 if method in ("start", "open") else 1.5


def time_all(backend):
    """Time all six gate-up kernels."""
    return {config: backend.time_kernel(Role.GATE_UP, config, 3) for config in SIX}


def environment():
    """Let a started Python import what this one can."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def pids(lines):
    return [line["pid"] for line in lines]


DEATHS = {
    "raise": (FailureKind.LAUNCH, "^ZeroDivisionError: a bug in a kernel's launcher$"),
    "raise_sticky": (FailureKind.LAUNCH, f"^RuntimeError: {STICKY}$"),
    "sticky": (FailureKind.LAUNCH, f"^RuntimeError: {STICKY}$"),
    "abort": (FailureKind.LAUNCH, r"was killed by signal 6 \(SIGABRT\): what\(\):  CUDA error: lost$"),
    "kill": (FailureKind.RESOURCES, r"was killed by signal 9 \(SIGKILL\), which Linux sends when the host's memory"),
    "exit": (FailureKind.RESOURCES, r"was killed by signal 9 \(SIGKILL\)"),
    "leave": (FailureKind.LAUNCH, "its GPU process exited with code 0$"),
    "scribble": (FailureKind.LAUNCH, "broke off its answer: a message cannot have"),
    "torn": (FailureKind.LAUNCH, "its GPU process exited with code 0$"),
    "hang_up": (FailureKind.LAUNCH, "it closed its answers"),
    "unpicklable": (FailureKind.LAUNCH, "pickle"),
    "child": (FailureKind.LAUNCH, "SIGABRT"),
}


@pytest.mark.parametrize("deed", DEATHS)
def test_a_candidate_that_ends_its_process_fails_alone(isolated, diary, deed):
    backend = isolated(Deed(what=deed, method="time_kernel", target=BAD))
    assert backend.open(64) is None
    found = time_all(backend)
    kind, words = DEATHS[deed]
    assert found[BAD].kind is kind
    assert re.search(words, found[BAD].reason), found[BAD].reason
    assert "\n" not in found[BAD].reason
    assert all(isinstance(found[config], Measured) for config in GOOD)
    # One more process was started, for the same count with the same seed, and it answered everything after the fault.
    first, second = pids(diary("start"))
    assert pids(diary("time_kernel")) == [first] * 3 + [second] * 3
    assert [(line["pid"], line["about"], line["seed"]) for line in diary("open")] == [
        (first, ["64"], 7),
        (second, ["64"], 7),
    ]


@pytest.mark.parametrize("deed", ["sleep", "half"])
@pytest.mark.parametrize("method", ["first_launch_us", "time_kernel", "verify_kernel"])
def test_a_question_without_an_answer_ends_at_its_time_limit(isolated, diary, deed, method):
    backend = isolated(Deed(what=deed, method=method, target=BAD), limits=impatient)
    assert backend.open(64) is None
    asked = getattr(backend, method)
    more = (3,) if method == "time_kernel" else ()
    started_s = time.monotonic()
    failed = asked(Role.DOWN, BAD, *more)
    assert 1.4 < time.monotonic() - started_s < 60.0
    assert failed == Failed(FailureKind.TIMEOUT, "did not end within 1.5 s; its GPU process was killed")
    assert not isinstance(asked(Role.DOWN, GOOD[0], *more), Failed)
    assert len(diary("start")) == 2


@pytest.mark.parametrize("method", ["time_routing", "time_combine", "verify_layer", "open"])
def test_every_other_question_about_one_thing_fails_alone_too(isolated, diary, method):
    backend = isolated(Deed(what="abort", method=method, times=1))
    plan = LayerPlan(gate_up=BAD, down=BAD)
    arguments = {"time_routing": (16,), "time_combine": (), "verify_layer": (plan,), "open": (64,)}[method]
    if method != "open":
        assert backend.open(64) is None
    asked = getattr(backend, method)
    assert asked(*arguments).kind is FailureKind.LAUNCH
    assert not isinstance(asked(*arguments), Failed)
    assert len(diary("start")) == 2


def test_a_fault_that_happens_once_costs_one_answer_and_not_the_candidate(isolated):
    backend = isolated(Deed(what="sticky", method="time_kernel", target=BAD, times=1))
    assert backend.open(64) is None
    first, second = (time_all(backend) for _ in range(2))
    assert [config for config in SIX if isinstance(first[config], Failed)] == [BAD]
    assert all(isinstance(outcome, Measured) for outcome in second.values())
    assert {config: first[config] for config in GOOD} == {config: second[config] for config in GOOD}


def test_a_candidate_that_did_it_twice_is_never_launched_again(isolated, diary):
    backend = isolated(Deed(what="abort", method="first_launch_us", target=BAD))
    for tokens in (1, 8, 64):
        assert backend.open(tokens) is None
        failed = backend.first_launch_us(Role.DOWN, BAD)
    assert len(diary("first_launch_us")) == 2
    assert failed.kind is FailureKind.LAUNCH
    assert failed.reason.startswith("not launched again: it ended its GPU process 2 times, the last time: ")
    assert isinstance(backend.time_kernel(Role.DOWN, BAD, 3), Failed)
    refused = LayerPlan(gate_up=GOOD[0], down=BAD), LayerPlan(gate_up=BAD, down=GOOD[0])
    assert backend.verify_layer(refused[0]).reason == failed.reason
    assert backend.verify_layer(refused[1]) is None  # as gate-up it has done nothing yet
    one, other = backend.time_layers(refused, 4)
    assert (one, isinstance(other, Measured)) == (failed, True)
    assert [line["about"] for line in diary("time_layers")] == [[1, "4"]]


def test_what_the_process_prints_stays_out_of_the_answers_and_off_the_screen(isolated, diary, capfd):
    backend = isolated(Deed(what="print", method="time_kernel"))
    assert backend.open(64) is None
    for _ in range(3):
        assert all(isinstance(outcome, Measured) for outcome in time_all(backend).values())
    assert len(diary("start")) == 1
    assert capfd.readouterr() == ("", "")
    assert backend._gpu._process._log.seek(0, 2) < 3 << 20  # of 8 MB: what is read by nobody does not fill the disk


def test_a_process_that_does_not_even_read_is_ended_and_replaced(isolated, diary):
    backend = isolated(limits=impatient)
    assert backend.open(64) is None
    thousands = [
        MoEKernelConfig(
            structure=Structure.GATHER, block_m=16, block_n=n, block_k=64, group_m=group, prefetch_distance=d
        )
        for n, group, d in itertools.product((32, 64, 128, 256), range(1, 65), range(2, 7))
    ]
    assert len(dict(compiled_now(backend, Role.DOWN, thousands))) == len(thousands)
    assert len(gpu_messages.packed(backend._gpu.news.compiled())) > 1 << 16  # more to tell than a pipe holds
    planted_gpu.stop(backend)
    assert backend.time_kernel(Role.DOWN, BAD, 3).kind is FailureKind.TIMEOUT
    outcome = backend.time_kernel(Role.DOWN, thousands[-1], 3)
    assert outcome.issue_efficiency.source is Source.STATIC
    assert diary("time_kernel")[-1]["known"] == len(thousands)


def test_a_process_knows_every_compiled_kernel_and_the_ceilings_and_is_told_once(isolated, diary, monkeypatch):
    told = []
    learned = gpu_messages.Learned
    monkeypatch.setattr(gpu_respawn, "Learned", lambda **news: told.append(len(news["compiled"])) or learned(**news))
    backend = isolated(Deed(what="abort", method="time_kernel", target=BAD, times=1))
    compiled = {role: dict(compiled_now(backend, role, SIX)) for role in Role}
    assert backend.open(64) is None
    assert backend.bound_us() == pytest.approx(1.64)
    found = time_all(backend)
    for config in GOOD:
        issue = found[config].issue_efficiency
        assert issue.value == compiled[Role.GATE_UP][config].registers / 256
    assert len(diary("ceilings")) == 1  # measured once, whatever happened since
    assert backend.bound_us() == pytest.approx(1.64)
    assert [count for count in told if count] == [12, 12]  # each process once


def test_compiling_waits_for_no_answer(isolated, diary):
    backend = isolated(
        Deed(what="sleep", method="time_combine"), limits=lambda method, *_: 6.0 if method == "time_combine" else 30.0
    )
    assert backend.open(64) is None
    answers = []
    asking = threading.Thread(target=lambda: answers.append(backend.time_combine()))
    asking.start()
    planted_gpu.until(lambda: diary("time_combine"))
    assert len(dict(compiled_now(backend, Role.DOWN, SIX))) == len(SIX)
    assert answers == []
    asking.join()
    assert answers[0].kind is FailureKind.TIMEOUT


def test_three_new_processes_of_no_use_end_the_run_with_one_sentence(isolated, diary):
    backend = isolated(Deed(what="abort", method="open"))
    for tokens in (1, 8):
        assert backend.open(tokens).kind is FailureKind.LAUNCH
    with pytest.raises(
        RunError, match=r"gives no more answers: 3 new processes in a row .* run `moetune doctor`"
    ) as error:
        backend.open(64)
    assert "\n" not in str(error.value)
    assert len(diary("start")) == 3


def test_processes_that_cannot_even_start_end_the_run(isolated, diary):
    backend = isolated(Deed(what="abort", method="start", spared=1), Deed(what="abort", method="time_combine"))
    assert backend.open(64) is None
    assert isinstance(backend.time_combine(), Failed)
    with pytest.raises(RunError, match="every trial so far is kept"):
        backend.time_routing(16)
    assert len(diary("start")) == 1 + 3


def test_bad_candidates_in_a_row_are_no_dead_gpu(isolated):
    backend = isolated(*(Deed(what="abort", method="time_kernel", target=config) for config in SIX[:5]))
    assert backend.open(64) is None
    assert [isinstance(outcome, Failed) for outcome in time_all(backend).values()] == [True] * 5 + [False]


@pytest.mark.parametrize("method", ["ceilings", "bound_us"])
def test_what_no_candidate_is_to_blame_for_is_asked_again_and_not_for_ever(isolated, diary, method):
    once = isolated(Deed(what="abort", method=method, times=1))
    assert once.open(64) is None
    assert getattr(once, method)() is not None
    always = isolated(Deed(what="abort", method=method, spared=2))
    assert always.open(64) is None
    with pytest.raises(RunError, match="SIGABRT"):
        getattr(always, method)()
    assert len(diary(method)) == 2 + 3


def test_a_count_that_finds_no_room_again_at_first_is_opened_when_the_driver_has_let_go(isolated, diary):
    backend = isolated(
        Deed(what="abort", method="time_kernel", target=BAD), Deed(what="full", method="open", spared=1, times=2)
    )
    assert backend.open(64) is None
    assert isinstance(backend.time_kernel(Role.DOWN, BAD, 3), Failed)
    assert isinstance(backend.time_kernel(Role.DOWN, GOOD[0], 3), Measured)
    assert len(diary("open")) == 4


def test_a_count_that_finds_no_room_any_more_ends_the_run(isolated):
    backend = isolated(Deed(what="abort", method="time_kernel", target=BAD), Deed(what="full", method="open", spared=1))
    assert backend.open(64) is None
    assert isinstance(backend.time_kernel(Role.DOWN, BAD, 3), Failed)
    with pytest.raises(RunError, match="GiB of GPU memory"):
        backend.time_kernel(Role.DOWN, GOOD[0], 3)


def test_a_count_without_room_leaves_the_process_as_it_is(isolated, diary):
    backend = isolated(Deed(what="full", method="open", target=4096))
    assert backend.open(4096).kind is FailureKind.RESOURCES
    assert backend.open(64) is None
    assert isinstance(backend.time_combine(), Measured)
    assert len(diary("start")) == 1


def test_a_machine_without_a_gpu_says_so_as_if_there_were_no_process(isolated):
    with pytest.raises(MissingError, match="no CUDA GPU in this machine"):
        _ = isolated(factory="planted_gpu:no_gpu").device
    with pytest.raises(RunError, match=r"could not start: ImportError: libcuda.so.1: .*; run `moetune doctor`"):
        isolated(factory="planted_gpu:broken_import").open(64)


def test_the_real_trials_say_in_the_tuner_that_there_is_no_gpu(isolated, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MissingError, match="no CUDA GPU in this machine"):
        _ = isolated(factory="moetune.measure.cuda:open_trials").device


def test_a_machine_that_can_start_no_process_says_so(isolated, monkeypatch):
    monkeypatch.setattr(gpu_process.sys, "executable", "/no/such/python")
    with pytest.raises(RunError, match="the GPU process could not be started: No such file"):
        isolated()


def test_a_driver_that_does_not_let_go_is_not_waited_for_for_ever(isolated, monkeypatch):
    backend = isolated(Deed(what="sleep", method="time_combine"), limits=impatient)
    assert backend.open(64) is None
    process = backend._gpu._process._process

    def hold(limit_s):
        monkeypatch.undo()
        raise subprocess.TimeoutExpired("worker", limit_s)

    monkeypatch.setattr(process, "wait", hold)
    with pytest.raises(
        RunError, match=r"does not let go of process \d+, whose kernel hangs; every trial so far is kept"
    ):
        backend.time_combine()
    process.wait()


def test_the_tuners_side_and_the_start_of_the_process_load_no_torch():
    code = "import sys, moetune.measure.isolated, moetune.measure.gpu_worker; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


def test_a_process_of_another_version_is_refused(isolated, monkeypatch):
    monkeypatch.setattr(gpu_respawn, "Start", gpu_messages.Start)
    other = ("moetune gpu process", 1, "0.0.0")
    monkeypatch.setattr("moetune.measure.isolated.Start", lambda **given: gpu_messages.Start(**given, handshake=other))
    with pytest.raises(RunError, match="moetune was changed while it ran"):
        _ = isolated().device


def test_another_gpu_under_the_same_number_ends_the_run(isolated):
    backend = isolated(Deed(what="abort", method="time_combine"))
    assert backend.open(64) is None
    backend._gpu._device = planted_gpu.TARGETS["sm_80"]
    assert isinstance(backend.time_combine(), Failed)
    with pytest.raises(RunError, match="the GPU changed while it was tuned, from NVIDIA A100"):
        backend.time_routing(16)


def test_clocks_are_those_of_all_processes_and_start_none(isolated, diary):
    backend = isolated(Deed(what="abort", method="time_combine"))
    assert backend.clocks() is None
    assert backend.open(1) is None
    assert backend.open(8) is None  # the process's readings so far are taken before each count
    backend.time_combine()
    assert backend.clocks().sm_mhz == (1001, 1001)
    backend.time_routing(16)
    assert backend.clocks().sm_mhz == (1001, 1002)  # the second process says 1002
    assert len(diary("start")) == 2


def test_counters_are_read_when_the_gpu_process_has_freed_everything(isolated, diary, monkeypatch):
    calls = []

    def count(jobs, *, by, device, device_index, sets, time_limit_s):
        assert by.ahead is None
        assert time_limit_s <= 9.0
        alive = [planted_gpu.is_alive(pid) for pid in pids(diary())]
        calls.append((by.way.title, jobs, device, device_index, sets, alive))
        return dict.fromkeys(jobs, Failed(FailureKind.RESOURCES, "no counters here"))

    monkeypatch.setattr("moetune.measure.sweep_counters.read_counters", count)
    backend = isolated()
    assert backend.open(64) is None
    plans = {64: LayerPlan(gate_up=BAD, down=BAD)}
    assert backend.counters({}) == {}
    assert backend.counters(plans, 9.0)[64].reason == "no counters here"
    job = CounterJob(shape=SHAPE, tokens=64, plan=plans[64], routing=UNIFORM)
    dead = [False] * len(calls[0][-1])
    assert calls == [("ncu", [job], DEVICE, 0, SWEEP_SETS, dead)]
    assert backend.clocks().sm_mhz == (1001, 1001)
    assert len(diary("start")) == 1
    assert isinstance(backend.time_combine(), Measured)  # and it goes on where it was
    assert [line["tokens"] for line in diary("time_combine")] == [64]


def test_ctrl_c_in_a_question_ends_its_process_at_once_and_leaves_no_stale_answer(isolated, diary, monkeypatch):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    backend = isolated(Deed(what="sleep", method="time_combine", times=1))
    assert backend.open(64) is None
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            backend.time_combine()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not planted_gpu.is_alive(diary("start")[0]["pid"])
    assert backend.time_kernel(Role.DOWN, BAD, 3).samples == 3


REAPED = """
import signal, sys
from pathlib import Path
import planted_gpu
from moetune_kernels.config import Role
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
backend = planted_gpu.open_backend(Path(sys.argv[1]), planted_gpu.Deed(what="abort", method="time_combine"))
assert backend.open(64) is None
print(backend.time_combine().reason)
print(backend.time_routing(16).samples)
backend.close()
"""


def test_a_tuner_whose_children_are_reaped_by_the_kernel_goes_on_too(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", REAPED, str(tmp_path)], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["its GPU process ended: what():  CUDA error: lost", "15"]
    assert planted_gpu.alive(tmp_path) == []


def test_closing_ends_the_process_and_the_compiles_and_may_be_repeated(isolated, diary):
    backend = isolated()
    assert backend.open(64) is None
    backend.close()
    assert not planted_gpu.is_alive(diary("start")[0]["pid"])  # not even as a zombie
    backend.close()
    assert backend._compiles.closed == 2


def test_the_card_is_what_the_first_process_found_before_it_used_the_gpu(isolated, diary):
    state = isolated().card()
    assert [other.pid for other in state.others] == [4242]
    assert len(diary("start")) == 1
