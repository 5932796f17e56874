"""NVML may be missing, old, or silent on any single value."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from moetune.measure.clocks import ClockReading, Clocks, ClockWatch
from moetune.outcome import ClockSpan, over_all


def refuse(*_):
    raise RuntimeError("not supported")


def fake_nvml(**overrides):
    """An H200 as NVML describes it; each function can be replaced."""
    values = {
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": {"GPU-1": "handle"}.__getitem__,
        "nvmlDeviceGetHandleByPciBusId": {"0000:01:00.0": "handle"}.__getitem__,
        "nvmlDeviceGetPowerUsage": lambda _: 512_300,
        "nvmlDeviceGetClockInfo": lambda _, which: {1: 1410, 2: 3201}[which],
        "nvmlDeviceGetMaxClockInfo": lambda *_: 1980,
        "nvmlDeviceGetTemperature": lambda *_: 61,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: 0x1 | 0x4 | 0x40,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x4,
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [],
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=3, memory=1),
    }
    return SimpleNamespace(**(values | overrides))


def read(monkeypatch, uuid="GPU-1", bus=None, **overrides):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**overrides))
    clocks = Clocks(uuid, bus)
    try:
        return clocks.read()
    finally:
        clocks.close()


def test_a_gpu_is_found_by_uuid_and_described_in_words(monkeypatch):
    assert read(monkeypatch).to_json() == {
        "sm_mhz": 1410, "sm_max_mhz": 1980, "memory_mhz": 3201, "temperature_c": 61, "power_w": 512.3,
        "throttle": ["power cap", "hardware thermal slowdown"],
    }  # fmt: skip


def test_a_gpu_whose_uuid_nvml_does_not_know_is_found_by_its_bus(monkeypatch):
    assert read(monkeypatch, uuid="GPU-other", bus="0000:01:00.0").sm_mhz == 1410


def test_an_unknown_gpu_is_never_confused_with_another(monkeypatch):
    assert read(monkeypatch, uuid="GPU-other") == ClockReading()


def test_without_nvml_every_reading_is_empty(monkeypatch):
    assert read(monkeypatch, nvmlInit=refuse) == ClockReading()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Clocks("GPU-1").read().to_json() == {}


@pytest.mark.parametrize(
    "missing", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetTemperature"]
)
def test_one_value_that_a_container_hides_costs_only_that_value(monkeypatch, missing):
    reading = read(monkeypatch, **{missing: refuse})
    assert reading.sm_mhz == 1410
    assert len([value for value in reading.to_json().values() if value is not None]) == 5


def test_an_old_driver_answers_by_the_old_name(monkeypatch):
    assert read(monkeypatch, nvmlDeviceGetCurrentClocksEventReasons=refuse).throttle == ("power cap",)


def test_a_clock_far_below_its_maximum_is_a_warning_with_its_cause():
    reading = ClockReading(sm_mhz=1200, sm_max_mhz=1980, throttle_bits=0x4)
    assert "1200 MHz of 1980 MHz (power cap)" in reading.warning
    assert ClockReading(sm_mhz=1900, sm_max_mhz=1980, throttle_bits=0x4).warning is None
    assert ClockReading().warning is None


def test_a_span_goes_from_the_lowest_to_the_highest_and_knows_every_reason():
    readings = [
        ClockReading(sm_mhz=1980, sm_max_mhz=1980, temperature_c=40, power_w=120.04, throttle_bits=0x1),
        ClockReading(sm_mhz=1500, sm_max_mhz=1980, temperature_c=70, power_w=698.0, throttle_bits=0x4),
        ClockReading(),
        ClockReading(sm_mhz=1600, throttle_bits=0x4 | 0x20),
    ]
    span = over_all(reading.span() for reading in readings)
    assert span == ClockSpan(
        sm_mhz=(1500, 1980), sm_max_mhz=1980, temperature_c=(40, 70), power_w=(120.0, 698.0),
        throttle=("power cap", "software thermal slowdown"),
    )  # fmt: skip
    assert over_all([]) is None
    assert over_all([None, None]) is None
    assert ClockReading().span() == ClockSpan()  # nothing said is not "nothing held it down"
    assert ClockReading(throttle_bits=0).span().throttle == ()


@pytest.mark.parametrize(
    ("throttle", "refused"),
    [
        (None, ()),
        ((), ()),
        (("power cap",), ()),
        (("hardware slowdown",), ("hardware slowdown",)),
        (("power cap", "software thermal slowdown"), ("software thermal slowdown",)),
        (("hardware thermal slowdown",), ("hardware thermal slowdown",)),
        (("hardware power brake",), ("hardware power brake",)),
    ],
)
def test_a_power_cap_is_the_normal_state_of_a_large_card_and_all_else_is_not(throttle, refused):
    span = ClockSpan(sm_mhz=(1900, 1980), sm_max_mhz=1980, throttle=throttle)
    assert span.slowdowns == refused
    assert bool(span.warning) == bool(refused)


def test_clocks_far_below_the_cards_own_are_a_warning_with_their_cause():
    low = ClockSpan(sm_mhz=(1155, 1980), sm_max_mhz=1980, throttle=("power cap",))
    assert "fell to 1155 MHz of 1980 MHz (power cap)" in low.warning
    assert ClockSpan().warning is None
    assert ClockSpan(sm_mhz=(300, 300)).warning is None  # what the card is made for is not known


class Ticking:
    """A GPU whose clock falls by 10 MHz with every look, and a second hand that the test moves."""

    def __init__(self):
        self.now_s, self.looks = 0.0, 0

    def read(self):
        self.looks += 1
        return ClockReading(sm_mhz=2000 - 10 * self.looks)

    def close(self):
        self.closed = True


def test_a_watch_looks_now_and_then_and_after_every_mark():
    gpu = Ticking()
    watch = ClockWatch(gpu, every_s=0.5, clock=lambda: gpu.now_s)
    assert (watch.whole(), watch.since_mark()) == (None, None)
    assert [watch.look().sm_mhz for _ in range(3)] == [1990] * 3
    gpu.now_s = 0.6
    assert watch.look().sm_mhz == 1980
    watch.mark()
    assert watch.since_mark() is None
    watch.look()  # at once, however short what is timed
    watch.look()
    gpu.now_s = 1.2
    watch.look()
    assert watch.since_mark().sm_mhz == (1960, 1970)
    assert watch.whole().sm_mhz == (1960, 1990)
    watch.close()
    assert gpu.closed


# Who else is on the GPU


def others(monkeypatch, **overrides):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**overrides))
    clocks = Clocks("GPU-1")
    try:
        return clocks.others(), clocks.busy_percent()
    finally:
        clocks.close()


def process(pid, memory_bytes=None):
    return SimpleNamespace(pid=pid, usedGpuMemory=memory_bytes)


def test_other_processes_are_named_and_this_one_is_none_of_them(monkeypatch):
    listed = [process(os.getpid(), 1 << 30), process(4242, 3 << 29), process(77)]
    found, busy = others(monkeypatch, nvmlDeviceGetComputeRunningProcesses=lambda _: listed)
    assert [str(one) for one in found] == ["process 4242 with 1.5 GiB", "process 77"]
    assert busy == 3


def test_what_nvml_does_not_say_is_none_and_not_nothing(monkeypatch):
    found = others(monkeypatch, nvmlDeviceGetComputeRunningProcesses=refuse, nvmlDeviceGetUtilizationRates=refuse)
    assert found == (None, None)
    assert others(monkeypatch, nvmlInit=refuse) == (None, None)
