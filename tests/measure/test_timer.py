"""Statistics and order of the timer; the events themselves need a GPU."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

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


class Gpu:
    """A GPU with one stream: a flush takes 200 us, a launch what it says; an event holds the time of its last record."""

    def __init__(self, monkeypatch):
        self.now_us, self.made, self.written = 0.0, 0, []
        gpu = self

        class Event:
            def __init__(self, *, enable_timing=False):
                assert enable_timing
                gpu.made += 1
                self.at_us = None

            def record(self, stream):
                assert stream == "stream"
                self.at_us = gpu.now_us

            def query(self):
                return True

            def elapsed_time(self, end):
                return (end.at_us - self.at_us) / 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
        monkeypatch.setattr(timer.Timer, "cool", lambda _: self.launch(200.0)())
        monkeypatch.setattr(timer, "MIN_FLUSH_WRITE_BYTES", 4096)

    def launch(self, us):
        def run():
            self.now_us += us

        return run


def test_each_launch_has_its_own_times_and_the_gpu_was_busy_from_the_first_flush_to_the_last_launch(monkeypatch):
    gpu = Gpu(monkeypatch)
    clock = timer.Timer(torch.device("cpu"), 1 << 20)
    places = []
    rounds = clock.rounds([gpu.launch(10.0), gpu.launch(30.0)], 4, after_last=places.append)
    assert rounds == [pytest.approx([10.0] * 4), pytest.approx([30.0] * 4)]
    assert places == [0, 1]
    assert clock.busy_s == pytest.approx((8 * 200.0 + 4 * 40.0) / 1e6)
    gpu.launch(5000.0)()  # whatever else ran in between is not the timer's
    assert clock.sample(gpu.launch(10.0), 3).median_us == pytest.approx(10.0)
    assert clock.busy_s == pytest.approx((11 * 200.0 + 4 * 40.0 + 30.0) / 1e6)


def test_events_are_made_once(monkeypatch):
    gpu = Gpu(monkeypatch)
    clock = timer.Timer(torch.device("cpu"), 1 << 20)
    for launches, count in itertools.product((1, 3), (2, 5)):
        times = clock.rounds([gpu.launch(10.0 * (place + 1)) for place in range(launches)], count)
        assert times == [pytest.approx([10.0 * (place + 1)] * count) for place in range(launches)]
    assert gpu.made == 2 * 3 * 5 + 2


def test_a_flush_writes_its_buffer_and_reads_all_of_the_other_one(monkeypatch):
    monkeypatch.setattr(timer, "MIN_FLUSH_WRITE_BYTES", 4096)
    monkeypatch.setattr(timer, "MIN_FLUSH_READ_BYTES", 1 << 12)
    clock = timer.Timer(torch.device("cpu"), 1 << 13)
    assert clock._read.numel() * 4 == 2 << 13
    clock._written.fill_(1.0)
    clock._read.fill_(1.0)
    clock.cool()
    assert not clock._written.any()
    assert float(clock._sum) == clock._read.numel()
