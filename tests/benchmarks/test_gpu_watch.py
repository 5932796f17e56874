"""Means over a window, and what is done where NVML keeps no samples."""

from __future__ import annotations

import time

import pytest
from gpu_watch import GpuWatch, Mean, Nvml, mean_over

from moetune.errors import MissingError
from tests.benchmarks.conftest import GPU, NVMLError

NOW_S = 1_000.0


def nvml(fake, now_s=NOW_S):
    return Nvml(GPU, fake, lambda: now_s)


def test_each_reading_counts_for_the_time_before_it():
    readings = [(0.0, 100.0), (0.2, 50.0), (1.0, 0.0)]
    assert mean_over(readings, (0.0, 1.0)) == Mean(pytest.approx(10.0), pytest.approx(1.0))


def test_readings_outside_the_window_count_for_nothing_but_their_part_inside():
    readings = [(0.0, 0.0), (1.0, 100.0), (2.0, 0.0), (3.0, 100.0), (4.0, 100.0)]
    assert mean_over(readings, (0.5, 1.5)) == Mean(pytest.approx(50.0), pytest.approx(1.0))


def test_a_gap_is_covered_by_no_reading():
    found = mean_over([(0.0, 0.0), (1.0, 100.0), (9.0, 0.0), (10.0, 0.0)], (0.0, 10.0))
    assert found == Mean(pytest.approx(100 / 3), pytest.approx(0.3))


@pytest.mark.parametrize("readings", [[], [(5.0, 90.0)], [(0.0, 90.0), (1.0, 90.0)]])
def test_no_reading_in_the_window_is_no_mean(readings):
    assert mean_over(readings, (4.0, 6.0)) is None


def test_every_buffered_sample_is_taken_once(fake_nvml):
    fake = fake_nvml([(999_000_000, 10), (999_500_000, 30)])
    watched = nvml(fake)
    assert watched.busy() == [(999.0, 10.0), (999.5, 30.0)]
    assert watched.busy() == []
    fake.samples = [*fake.samples, (1_000_000_000, 70)]
    assert watched.busy() == [(1000.0, 70.0)]
    assert watched.how == "samples"
    assert fake.asked == ["GPU-0"]


@pytest.mark.parametrize(
    "samples",
    [NVMLError(3), [], [(5_000_000, 10)]],
    ids=["not supported", "none", "of another clock"],
)
def test_without_samples_the_rate_is_asked_for(fake_nvml, samples):
    watched = nvml(fake_nvml(samples))
    assert watched.busy() == [(NOW_S, 37.0)]
    assert watched.how == "rates"


def test_a_gpu_that_nvml_does_not_know_is_missing(fake_nvml):
    fake = fake_nvml()
    fake.nvmlDeviceGetHandleByUUID = lambda uuid: (_ for _ in ()).throw(NVMLError(6))
    with pytest.raises(MissingError, match="NVML does not show NVIDIA H200"):
        Nvml(GPU, fake)


def test_a_watch_collects_until_the_block_ends_and_once_more_after(fake_nvml):
    watched = GpuWatch(Nvml(GPU, fake_nvml(NVMLError(3))), pause_s=0.01)
    with watched:
        time.sleep(0.1)
    count = len(watched.busy)
    assert count > 3
    assert len(watched.sm_mhz) == count
    assert {value for _, value in watched.sm_mhz} == {1980.0}
    time.sleep(0.05)
    assert len(watched.busy) == count
