"""One question about many kernels: the process goes from one to the next by itself, and each still fails alone."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from contextlib import closing

import planted_gpu
import pytest
from planted_gpu import Deed

from moetune.engine.backend import Entered, EntryTerms
from moetune.errors import RunError
from moetune.outcome import Failed, FailureKind, Measured
from moetune_kernels.config import MoEKernelConfig, Role, Structure

SIX = [
    MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=block_n, block_k=block_k)
    for block_n in (32, 64, 128)
    for block_k in (64, 128)
]
BAD = SIX[2]
TERMS = EntryTerms(slow_ratio=2.5, samples=3, long_samples=1, long_us=1500.0)
DEATHS = ("raise", "sticky", "abort", "leave", "scribble", "torn", "hang_up", "unpicklable", "half", "sleep")


def impatient(method, arguments, tokens):
    return 30.0 if method == "start" else 1.5


def asked(diary, method):
    """Return the kernels that ``method`` was asked about, and how many processes answered."""
    lines = diary(method)
    return [line["about"][1] for line in lines], len({line["pid"] for line in lines})


@pytest.mark.parametrize("deed", DEATHS)
def test_the_kernel_in_hand_fails_alone_and_the_others_are_asked_once(isolated, diary, deed):
    backend = isolated(Deed(what=deed, method="time_kernel", target=BAD), limits=impatient)
    assert backend.open(64) is None
    outcomes = list(backend.time_kernels(Role.DOWN, SIX, 3))
    assert [isinstance(outcome, Measured) for outcome in outcomes] == [config != BAD for config in SIX]
    assert asked(diary, "time_kernel") == ([str(config) for config in SIX], 2)
    assert len(diary("start")) == 2


def test_two_of_six_that_end_their_processes_fail_and_are_not_launched_a_third_time(isolated, diary):
    deeds = [Deed(what="abort", method="verify_kernel", target=config) for config in (SIX[0], SIX[5])]
    backend = isolated(*deeds)
    for tokens in (1, 8, 64):
        assert backend.open(tokens) is None
        verdicts = list(backend.verify_kernels(Role.DOWN, SIX))
        assert [wrong is None for wrong in verdicts] == [False, True, True, True, True, False]
    assert [verdicts[place].reason.startswith("not launched again") for place in (0, 5)] == [True, True]
    lines, processes = asked(diary, "verify_kernel")
    assert (len(lines), processes) == (2 * 6 + 4, 5)
    assert list(backend.verify_kernels(Role.DOWN, [])) == []


def test_every_kernel_has_the_whole_limit_for_itself(isolated):
    backend = isolated(Deed(what="wait", method="time_kernel"), limits=impatient)
    assert backend.open(64) is None
    started_s = time.monotonic()
    assert all(isinstance(outcome, Measured) for outcome in backend.time_kernels(Role.DOWN, SIX, 3))
    assert time.monotonic() - started_s > 1.5  # more than the limit of one


def test_the_process_goes_on_while_the_tuner_writes_an_end_down(isolated, diary):
    backend = isolated()
    assert backend.open(64) is None
    with closing(backend.time_kernels(Role.DOWN, SIX, 3)) as ends:
        next(ends)
        deadline = time.monotonic() + 10.0
        while len(diary("time_kernel")) < len(SIX):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert all(isinstance(outcome, Measured) for outcome in ends)


def test_who_wants_no_more_has_the_rest_not_launched_and_the_next_question_answered(isolated, diary):
    backend = isolated(Deed(what="wait", method="time_kernel"))
    assert backend.open(64) is None
    for _ in range(2):
        with closing(backend.time_kernels(Role.DOWN, SIX, 3)) as ends:
            assert isinstance(next(ends), Measured)
    assert backend.time_routing(16).samples == 15
    assert backend.open(8) is None
    assert len(diary("time_kernel")) <= 2 * 2  # the one that was taken, and the one in hand
    assert len(diary("start")) == 1


def test_all_answers_may_be_there_before_the_stop_is(isolated, diary):
    backend = isolated()
    assert backend.open(64) is None
    with closing(backend.time_kernels(Role.DOWN, SIX, 3)) as ends:
        next(ends)
        while len(diary("time_kernel")) < len(SIX):
            time.sleep(0.01)
        time.sleep(0.1)
    assert [backend.time_routing(block_m).samples for block_m in (16, 32)] == [15, 15]
    assert len(diary("start")) == 1


@pytest.mark.parametrize("deed", ["abort", "sticky", "sleep"])
def test_what_is_in_hand_when_nobody_wants_more_may_be_the_end_of_its_process_and_of_nothing_else(
    isolated, diary, deed
):
    backend = isolated(
        Deed(what=deed, method="time_kernel", target=SIX[1]), Deed(what="wait", method="time_kernel"), limits=impatient
    )
    assert backend.open(64) is None
    with closing(backend.time_kernels(Role.DOWN, SIX, 3)) as ends:
        assert isinstance(next(ends), Measured)
        while len(diary("time_kernel")) < 2:
            time.sleep(0.01)
    assert isinstance(backend.time_routing(16), Measured)  # it is not to blame
    assert [line["about"] for line in diary("open")] == [["64"], ["64"]]
    assert len(diary("start")) == 2


def test_kernels_that_enter_are_held_against_the_fastest_so_far_whichever_process_met_it(isolated, diary):
    backend = isolated(Deed(what="abort", method="time_kernel", target=SIX[3]))
    assert backend.open(64) is None
    times = {config: backend.first_launch_us(Role.DOWN, config) for config in SIX}
    launched = len(diary("time_kernel"))
    # From the fastest of three on, one is refused before the process dies and one after.
    by_time = sorted(set(SIX) - {SIX[3]}, key=times.get)
    order = [by_time[0], by_time[3], SIX[3], by_time[4], by_time[1]]
    limit_us = (times[by_time[1]] + times[by_time[3]]) / 2
    terms = EntryTerms(slow_ratio=limit_us / times[by_time[0]], samples=3, long_samples=1, long_us=1500.0)
    ends = list(backend.enter_kernels(Role.DOWN, order, terms))
    fast, slow, dead, late, last = ends
    assert fast.outcome.samples == last.outcome.samples == 3
    assert slow == Entered(times[by_time[3]], None)
    assert late == Entered(times[by_time[4]], None)
    assert (dead.first_us, dead.outcome.kind) == (None, FailureKind.LAUNCH)
    timed, _ = asked(diary, "time_kernel")
    assert timed[launched:] == [str(config) for config in (by_time[0], SIX[3], by_time[1])]


def test_a_long_first_launch_has_the_samples_of_a_long_one_and_a_failed_one_none(isolated):
    backend = isolated(Deed(what="refuse", method="first_launch_us", target=BAD))
    assert backend.open(64) is None
    terms = EntryTerms(slow_ratio=2.5, samples=3, long_samples=1, long_us=0.0)
    ends = list(backend.enter_kernels(Role.DOWN, SIX, terms))
    assert [end.outcome.samples for config, end in zip(SIX, ends, strict=True) if config != BAD] == [1] * 5
    assert ends[2].outcome == Failed(FailureKind.LAUNCH, "a launch that failed and harmed nobody")
    assert ends[2].first_us is None


def test_a_kernel_that_is_wrong_after_its_launches_has_no_time_and_one_without_a_time_is_not_compared(isolated, diary):
    backend = isolated(
        Deed(what="refuse", method="recheck_kernel", target=BAD),
        Deed(what="refuse", method="time_kernel", target=SIX[4]),
    )
    assert backend.open(64) is None
    outcomes = list(backend.time_and_recheck_kernels(Role.DOWN, SIX, 25))
    assert [isinstance(outcome, Failed) for outcome in outcomes] == [config in (BAD, SIX[4]) for config in SIX]
    assert asked(diary, "recheck_kernel") == ([str(config) for config in SIX if config != SIX[4]], 1)


def test_ctrl_c_between_two_answers_ends_the_process_at_once_and_leaves_no_stale_answer(isolated, diary):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    backend = isolated(Deed(what="sleep", method="time_kernel", target=SIX[1], times=1))
    assert backend.open(64) is None
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(backend.time_kernels(Role.DOWN, SIX, 3))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not planted_gpu.is_alive(diary("start")[0]["pid"])
    assert [outcome.samples for outcome in backend.time_kernels(Role.DOWN, SIX, 5)] == [5] * 6


def test_a_backend_that_is_closed_meanwhile_ends_the_question_with_a_sentence(isolated):
    backend = isolated(Deed(what="wait", method="time_kernel"))
    assert backend.open(64) is None
    ends = backend.time_kernels(Role.DOWN, SIX, 3)
    next(ends)
    closer = threading.Thread(target=backend.close)
    closer.start()
    closer.join()
    with pytest.raises(RunError, match="the sweep ended"):
        list(ends)


def test_what_the_tuner_learns_is_told_with_the_next_question_once(isolated, diary):
    backend = isolated()
    assert backend.open(64) is None
    list(backend.time_kernels(Role.DOWN, SIX[:2], 3))
    backend.submit((Role.DOWN, config) for config in SIX)
    backend.ended()
    list(backend.time_kernels(Role.DOWN, SIX[2:], 3))
    known = [line["known"] for line in diary("time_kernel")]
    assert known == [*itertools.repeat(0, 2), *itertools.repeat(6, 4)]
