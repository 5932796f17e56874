"""A hang is told from slow work: a launch sample may take a minute, a reference of many tokens as long as it needs."""

from __future__ import annotations

import doctest

import pytest

from moetune.measure import faults, strikes
from moetune.measure.isolated_limits import LOAD_S, SAMPLE_LIMIT_S, TimeLimits
from moetune.outcome import FailureKind
from moetune_kernels.shape import MoEShape

LARGE = MoEShape(hidden=4096, inter=14336, local_experts=64, top_k=8)
TIMER_LIMIT_S = 30.0  # after which the process's own timer gives up, with the better sentence


@pytest.fixture
def limits():
    return TimeLimits(LARGE)


def test_a_launch_sample_has_the_same_limit_at_every_token_count(limits):
    for method in ("time_kernels", "time_routing", "time_combine", "clocks", "a method that comes later"):
        assert limits(method, (), 1) == limits(method, (), 131_072) == SAMPLE_LIMIT_S
    assert limits("enter_kernels", (), 1) == 2 * SAMPLE_LIMIT_S + LOAD_S  # the first launch, then samples


def test_a_reference_has_a_limit_that_follows_its_work(limits):
    h200_s = 6.0 * 8 * 16384 * 4096 * 14336 / 2e13
    for method in ("open", "verify_kernels", "time_and_recheck_kernels", "verify_layer"):
        assert limits(method, (), 1) < limits(method, (), 1024) < limits(method, (), 16384)
        assert limits(method, (), 16384) > 20 * h200_s
    assert limits("open", (), 64) < 120.0
    assert limits("time_and_recheck_kernels", (), 64) == limits("verify_kernels", (), 64) + SAMPLE_LIMIT_S


def test_what_a_question_had_in_hand_that_was_broken_off_has_the_time_of_the_longest(limits):
    methods = ("enter_kernels", "verify_kernels", "time_kernels", "time_and_recheck_kernels")
    for tokens in (1, 16384):
        assert limits("settle", (), tokens) >= max(limits(method, (), tokens) for method in methods)


def test_layers_have_a_limit_that_follows_plans_rounds_and_routings(limits):
    plans = [None] * 5
    assert limits("time_layers", (plans, 40), 1) > limits("time_layers", (plans, 6), 1)
    assert limits("time_layers", (plans, 6), 1) > limits("time_layers", (plans[:1], 6), 1)
    assert limits("time_rerouted", (plans[:2], 20), 1) > 3 * limits("time_layers", (plans[:2], 20), 1)


def test_the_process_has_time_to_say_itself_that_a_kernel_hangs(limits):
    for method in ("ceilings", "open", "enter_kernels", "time_kernels", "verify_layer"):
        assert limits(method, (), 1) >= 2 * TIMER_LIMIT_S
    assert limits("time_layers", ([None], 2), 1) >= 2 * TIMER_LIMIT_S


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (-9, FailureKind.RESOURCES, "memory runs out"),
        (137, FailureKind.RESOURCES, "memory runs out"),
        (-11, FailureKind.LAUNCH, "killed by signal 11 (SIGSEGV): last words"),
        (139, FailureKind.LAUNCH, "killed by signal 11 (SIGSEGV): last words"),
        (1, FailureKind.LAUNCH, "exited with code 1: last words"),
        (0, FailureKind.LAUNCH, "exited with code 0: last words"),
    ],
)
def test_a_death_is_told_by_its_exit_code_and_its_last_words(code, kind, words):
    found = faults.dead(code, "something\n\nlast words\n")
    assert found.kind is kind
    assert words in found.reason


def test_of_many_last_words_those_of_the_error_count_and_never_more_than_a_line():
    said = "what():  CUDA error: an illegal memory access\nframe #0: libc10.so\nframe #1: libtorch.so\n" + "x" * 9999
    assert faults.dead(-6, said).reason.endswith("(SIGABRT): what():  CUDA error: an illegal memory access")
    assert len(faults.dead(-6, "x" * 9999).reason) < 300
    assert faults.dead(-6, "").reason.endswith("(SIGABRT)")


@pytest.mark.parametrize("module", [faults, strikes])
def test_the_examples_hold(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
