"""How long questions took on the host's clock."""

from __future__ import annotations

import itertools

import pytest

from moetune.measure.cuda import CudaTrials
from moetune.measure.stopwatch import Stopwatch, question


class Asked:
    """Two questions, one of which asks the other; each look at the clock finds a second gone."""

    def __init__(self):
        seconds = itertools.count()
        self.stopwatch = Stopwatch(lambda: float(next(seconds)))

    @question
    def inner(self, value):
        return value

    @question
    def outer(self, value, *, fail=False):
        assert not fail
        return self.inner(value) + self.inner(value)


def test_questions_add_up_and_one_inside_another_counts_once():
    asked = Asked()
    assert asked.inner(2) == 2
    assert asked.stopwatch.total_s == 1.0
    assert asked.outer(3) == 6
    assert asked.stopwatch.total_s == 2.0


def test_a_question_that_raises_is_counted_as_well():
    asked = Asked()
    with pytest.raises(AssertionError):
        asked.outer(1, fail=True)
    asked.inner(1)
    assert asked.stopwatch.total_s == 2.0


def test_every_question_of_the_gpu_process_is_counted():
    uncounted = {"device", "card", "lost", "learn", "busy", "asked", "clocks", "close"}
    methods = {name for name in vars(CudaTrials) if not name.startswith("_")} - uncounted
    assert len(methods) >= 12
    assert [name for name in methods if not hasattr(vars(CudaTrials)[name], "__wrapped__")] == []
