"""Statistics and order of the timer; the events themselves need a GPU."""

from __future__ import annotations

import gc

import pytest

from moetune.measure import timer


def test_one_slow_sample_moves_neither_the_median_nor_the_spread():
    calm, disturbed = [10.0, 10.1, 10.2, 10.3, 10.4, 10.5], [10.0, 10.1, 10.2, 10.3, 10.4, 900.0]
    assert timer.summarize(disturbed).median_us == pytest.approx(timer.summarize(calm).median_us)
    assert timer.summarize(disturbed).spread_us == pytest.approx(timer.summarize(calm).spread_us)


def test_spread_is_half_the_range_from_the_20th_to_the_80th_percentile():
    sample = timer.summarize([float(value) for value in range(101)])
    assert (sample.median_us, sample.spread_us, sample.count) == (50.0, 30.0, 101)


def test_a_single_sample_has_no_spread():
    assert timer.summarize([7.5]) == timer.Sample(7.5, 0.0, 1)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_steady_drift_of_the_clock_favours_no_candidate(count):
    turns = 2 * count  # one full turn of starts
    place = dict.fromkeys(range(count), 0)
    for turn in range(turns):
        order = timer.round_order(count, turn)
        assert sorted(order) == list(range(count))
        for at, index in enumerate(order):
            place[index] += turn * count + at
    assert len(set(place.values())) == 1


def test_garbage_is_not_collected_during_a_capture_and_is_afterwards():
    with timer.no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


class NeverDone:
    def query(self):
        return False


def test_a_kernel_that_never_ends_is_given_up():
    with pytest.raises(timer.DeviceHungError, match=r"within 0\.01 s"):
        timer.wait(NeverDone(), limit_s=0.01)


class DoneAfter:
    """An event that comes with its third look."""

    def __init__(self, looks):
        self.looks = looks

    def query(self):
        self.looks -= 1
        return self.looks <= 0


@pytest.mark.parametrize(("looks", "at_least"), [(1, 1), (3, 3)])
def test_something_else_is_done_meanwhile_at_least_once_and_as_long_as_it_takes(looks, at_least):
    calls = []
    timer.wait(DoneAfter(looks), meanwhile=lambda: calls.append(1))
    assert len(calls) == at_least
