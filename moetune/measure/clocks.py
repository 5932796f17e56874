"""What NVML says of a GPU's clocks, heat and power. Every field is optional: containers and MIG slices hide some."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from moetune.outcome import POWER_CAP, SLOW_CLOCK_SHARE, ClockSpan, over_all

# Reasons that lower the clock under load, by NVML's bit; idle and application clocks are no cause for a warning.
THROTTLE_REASONS = {
    0x4: POWER_CAP,
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
IDLE_BIT = 0x1
READING_S = 0.5  # NVML takes milliseconds, a screening sample less than one


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """One look at the GPU. Clocks in MHz, temperature in degrees Celsius, power in watts; None where NVML is silent."""

    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle_bits: int | None = None

    @property
    def throttle(self) -> tuple[str, ...]:
        """Why the clock is held down, in words."""
        bits = self.throttle_bits or 0
        return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)

    @property
    def warning(self) -> str | None:
        """One sentence when times taken now are not to be trusted, else None."""
        if self.sm_mhz is not None and self.sm_max_mhz and self.sm_mhz < SLOW_CLOCK_SHARE * self.sm_max_mhz:
            why = f" ({', '.join(self.throttle)})" if self.throttle else ""
            return (
                f"the SM clock is {self.sm_mhz} MHz of {self.sm_max_mhz} MHz{why}; times are slower than the GPU can do"
            )
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the fields that NVML gave, and the throttle reasons in words."""
        known = {name: value for name, value in asdict(self).items() if value is not None and name != "throttle_bits"}
        return known | ({"throttle": list(self.throttle)} if self.throttle_bits is not None else {})

    def span(self) -> ClockSpan:
        """Return this one look as a span."""
        return ClockSpan(
            sm_mhz=_twice(self.sm_mhz),
            sm_max_mhz=self.sm_max_mhz,
            memory_mhz=_twice(self.memory_mhz),
            temperature_c=_twice(self.temperature_c),
            power_w=_twice(None if self.power_w is None else round(self.power_w, 1)),
            throttle=None if self.throttle_bits is None else self.throttle,
        )


def _twice(value: Any) -> Any:
    return None if value is None else (value, value)


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process with a CUDA context on the GPU, and the bytes that it holds there, where NVML says."""

    pid: int
    memory_bytes: int | None

    def __str__(self) -> str:
        held = "" if self.memory_bytes is None else f" with {self.memory_bytes / (1 << 30):.1f} GiB"
        return f"process {self.pid}{held}"


class Clocks:
    """Reads one GPU through NVML, found by UUID or PCI bus id because NVML ignores CUDA_VISIBLE_DEVICES.

    Without NVML, or where it does not know the GPU, every reading is empty.
    """

    def __init__(self, uuid: str | None, pci_bus_id: str | None = None) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # noqa: BLE001  # no package, no driver, no library, wrong version: all mean no readings
            return
        self._nvml = pynvml
        by_uuid = (pynvml.nvmlDeviceGetHandleByUUID, uuid)
        for find, name in (by_uuid, (pynvml.nvmlDeviceGetHandleByPciBusId, pci_bus_id)):
            if name and self._handle is None:
                self._handle = _or_none(lambda find=find, name=name: find(name))

    @classmethod
    def of_device(cls, index: int) -> Clocks:
        """Return the reader of CUDA device ``index`` as torch counts it."""
        import torch

        found = torch.cuda.get_device_properties(index)
        uuid = getattr(found, "uuid", None)
        parts = [getattr(found, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
        bus = "{:08X}:{:02X}:{:02X}.0".format(*parts) if None not in parts else None
        return cls(None if uuid is None else f"{'MIG' if 'MIG' in found.name else 'GPU'}-{uuid}", bus)

    def read(self) -> ClockReading:
        """Return what NVML says now."""
        nvml, handle = self._nvml, self._handle
        if nvml is None or handle is None:
            return ClockReading()
        power_mw = _or_none(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return ClockReading(
            sm_mhz=_or_none(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            sm_max_mhz=_or_none(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_mhz=_or_none(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            temperature_c=_or_none(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            power_w=None if power_mw is None else power_mw / 1000,
            throttle_bits=_throttle_bits(nvml, handle),
        )

    def others(self) -> tuple[OtherProcess, ...] | None:
        """Return the processes that compute on the GPU, this one left out; None where NVML does not say."""
        nvml, handle = self._nvml, self._handle
        found = None if handle is None else _or_none(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if found is None:
            return None
        listed = [
            OtherProcess(process.pid, getattr(process, "usedGpuMemory", None))
            for process in found
            if process.pid != os.getpid()
        ]
        return tuple(listed)

    def busy_percent(self) -> int | None:
        """Return the share of the last moments in which a kernel ran; None where NVML does not say."""
        nvml, handle = self._nvml, self._handle
        return None if handle is None else _or_none(lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))

    def close(self) -> None:
        """Let go of NVML; safe to call twice."""
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
        self._nvml = self._handle = None


class ClockWatch:
    """Looks at a GPU now and then while it works, and remembers what it saw.

    Args:
        clocks: who reads.
        every_s: seconds between two looks.
        clock: tells the seconds.
    """

    def __init__(self, clocks: Clocks, every_s: float = READING_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._clocks, self._every_s, self._clock = clocks, every_s, clock
        self._due_s = -inf
        self._latest = ClockReading()
        self._since_mark: ClockSpan | None = None
        self._whole: ClockSpan | None = None

    def look(self) -> ClockReading:
        """Return the last reading, which is a new one when that was long ago."""
        if self._clock() >= self._due_s:
            self._latest = self._clocks.read()
            self._since_mark = over_all([self._since_mark, self._latest.span()])
            self._whole = over_all([self._whole, self._latest.span()])
            self._due_s = self._clock() + self._every_s
        return self._latest

    def mark(self) -> None:
        """Begin a span: the next look reads whenever the last one was."""
        self._since_mark, self._due_s = None, -inf

    def since_mark(self) -> ClockSpan | None:
        """Return what was seen since the last mark, None when nobody looked."""
        return self._since_mark

    def whole(self) -> ClockSpan | None:
        """Return what was seen at all, None when nobody looked."""
        return self._whole

    def close(self) -> None:
        """Let go of NVML; safe to call twice."""
        self._clocks.close()


def _throttle_bits(nvml: Any, handle: Any) -> int | None:
    """Ask by the new name, then by the old one: old drivers lack the new function."""
    new = _or_none(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    return new if new is not None else _or_none(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _or_none(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:  # noqa: BLE001  # NVML raises a class per error, and a missing one means only a missing field
        return None
