"""NVML may be missing, old, or silent on any single value."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from moetune.measure.clocks import ClockReading, Clocks, slowest


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


def test_the_worst_of_several_readings_is_kept():
    readings = [
        ClockReading(sm_mhz=1980, temperature_c=40, throttle_bits=0x4),
        ClockReading(sm_mhz=1500, temperature_c=70, throttle_bits=0x20),
        ClockReading(),
    ]
    worst = slowest(readings)
    assert (worst.sm_mhz, worst.temperature_c) == (1500, 70)
    assert worst.throttle == ("power cap", "software thermal slowdown")
    assert slowest([]) is None
