"""Streams of answers that are broken off, paused, or end with their process at a bad moment: who is to blame, and who not."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import closing

import planted_gpu
import pytest
from planted_gpu import Deed, PlantedGpu

from moetune.measure import gpu_process
from moetune.measure.gpu_messages import Stop, packed
from moetune.measure.gpu_process import GpuProcess
from moetune.outcome import Failed, Measured
from moetune_kernels.config import MoEKernelConfig, Role, Structure

SIX = [
    MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=block_n, block_k=block_k)
    for block_n in (32, 64, 128)
    for block_k in (64, 128)
]
ENDS = ("abort", "raise", "sticky", "torn", "leave", "unpicklable")


def impatient(method, arguments, tokens):
    return 30.0 if method == "start" else 1.5


def break_off_with_the_second_in_hand(backend, diary):
    with closing(backend.time_kernels(Role.DOWN, SIX, 3)) as ends:
        assert isinstance(next(ends), Measured)
        while len(diary("time_kernel")) < 2:
            time.sleep(0.01)


def test_a_process_that_ended_between_two_questions_costs_the_next_kernel_nothing(isolated, diary):
    backend = isolated()
    assert backend.open(64) is None
    for asked in (lambda: list(backend.time_kernels(Role.DOWN, SIX, 3)), lambda: [backend.time_routing(16)]):
        os.kill(backend._gpu.pid, signal.SIGKILL)
        time.sleep(0.2)
        assert all(isinstance(outcome, Measured) for outcome in asked())
    assert len(diary("start")) == len(diary("open")) == 3


def test_a_tuner_that_was_stopped_past_the_time_limit_reads_the_answer_that_lies_there(isolated, diary, monkeypatch):
    backend = isolated(Deed(what="wait", method="time_kernel", target=SIX[2]), limits=impatient)
    assert backend.open(64) is None
    real, pauses = GpuProcess._is_dead, []

    def stopped(process):
        if len(diary("time_kernel")) > 2 and not pauses:
            pauses.append(time.sleep(2.0))
        return real(process)

    monkeypatch.setattr(GpuProcess, "_is_dead", stopped)
    assert all(isinstance(outcome, Measured) for outcome in backend.time_kernels(Role.DOWN, SIX, 3))
    assert pauses
    assert len(diary("start")) == 1


def test_ctrl_c_while_a_question_that_was_broken_off_is_waited_for_ends_the_process(isolated, diary):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    backend = isolated(Deed(what="sleep", method="time_kernel", target=SIX[1], times=1))
    assert backend.open(64) is None
    break_off_with_the_second_in_hand(backend, diary)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            backend.time_routing(16)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not planted_gpu.is_alive(diary("start")[0]["pid"])
    assert [outcome.samples for outcome in backend.time_kernels(Role.DOWN, SIX, 5)] == [5] * 6


@pytest.mark.parametrize("deed", ["abort", "sleep"])
def test_no_process_is_started_to_be_asked_what_only_the_last_one_knew(isolated, diary, deed):
    backend = isolated(
        Deed(what=deed, method="time_kernel", target=SIX[1]), Deed(what="wait", method="time_kernel"), limits=impatient
    )
    assert backend.open(64) is None
    break_off_with_the_second_in_hand(backend, diary)
    assert backend.clocks() is None
    assert len(diary("start")) == 1
    assert backend.open(8) is None
    assert [line["about"] for line in diary("open")] == [["64"], ["8"]]


def test_a_kernel_that_stands_twice_in_a_question_has_one_strike_for_each_launch(isolated, diary):
    backend = isolated(Deed(what="abort", method="time_kernel", target=SIX[1]))
    assert backend.open(64) is None
    outcomes = list(backend.time_kernels(Role.DOWN, [SIX[1], SIX[0], SIX[1], SIX[0], SIX[1]], 3))
    assert [isinstance(outcome, Measured) for outcome in outcomes] == [False, True, False, True, False]
    assert [outcome.reason.startswith("not launched again") for outcome in outcomes[::2]] == [False, False, True]
    assert len(diary("start")) == 3


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_broken_off_or_ends_every_answer_is_the_kernel_s_own(isolated, seed):
    draw = random.Random(seed)
    bad = draw.sample(SIX, 2)
    deeds = [
        Deed(what=draw.choice(ENDS), method="time_kernel", target=config, times=1, spared=draw.randrange(3))
        for config in bad
    ]
    backend = isolated(*deeds, limits=impatient)
    right, failed, kills = PlantedGpu(backend._settings), [], 0
    for tokens in draw.choices([1, 8, 64], k=10):
        assert backend.open(tokens) is None
        right.tokens = tokens
        for _ in range(draw.randrange(1, 3)):
            asked = draw.sample(SIX, draw.randrange(1, 7))
            wanted = asked[: draw.choice([len(asked), draw.randrange(len(asked) + 1)])]
            with closing(backend.time_kernels(Role.DOWN, asked, 5)) as ends:
                for config in wanted:
                    outcome = next(ends)
                    if isinstance(outcome, Failed):
                        failed += [config] * (not outcome.reason.startswith("not launched again"))
                    else:
                        assert (outcome.median_us, outcome.samples) == (right.kernel_us(Role.DOWN, config), 5)
                    if draw.random() < 0.05 and backend._gpu.pid is not None:
                        os.kill(backend._gpu.pid, signal.SIGKILL)  # by somebody else: it looks like the kernel's fault
                        kills += 1
            if draw.random() < 0.3 and isinstance(backend.time_routing(16), Failed):
                failed.append("routing")
    assert sum(failed.count(config) - (config in bad) for config in set(failed)) <= kills


def test_ctrl_c_while_a_question_is_broken_off_leaves_no_stale_answer(isolated, monkeypatch):
    def interrupted(message):
        if isinstance(message, Stop):
            raise KeyboardInterrupt
        return packed(message)

    backend = isolated(Deed(what="wait", method="time_kernel"))
    assert backend.open(64) is None
    pid = backend._gpu.pid
    ends = backend.time_kernels(Role.DOWN, SIX, 3)
    next(ends)
    with monkeypatch.context() as patch:
        patch.setattr(gpu_process, "packed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ends.close()
    assert not planted_gpu.is_alive(pid)
    assert [outcome.samples for outcome in backend.time_kernels(Role.DOWN, SIX, 5)] == [5] * 6
