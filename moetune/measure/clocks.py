"""What NVML says of a GPU's clocks, heat and power. Every field is optional: containers and MIG slices hide some."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

# Reasons that lower the clock under load, by NVML's bit; idle and application clocks are no cause for a warning.
THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
SLOW_CLOCK_SHARE = 0.75  # NVBench discards samples below this share of the nominal clock


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


def slowest(readings: list[ClockReading]) -> ClockReading | None:
    """Return the readings' worst: lowest clocks, most heat and power, every throttle reason seen; None without any.

    >>> slowest([ClockReading(sm_mhz=1980, throttle_bits=0), ClockReading(sm_mhz=1500, throttle_bits=4)]).throttle
    ('power cap',)
    """
    if not readings:
        return None
    known = {
        field.name: [value for reading in readings if (value := getattr(reading, field.name)) is not None]
        for field in fields(ClockReading)
    }
    worst: dict[str, Any] = {name: min(values) for name, values in known.items() if values and name.endswith("_mhz")}
    worst |= {name: max(values) for name, values in known.items() if values and name in ("temperature_c", "power_w")}
    if known["throttle_bits"]:
        bits = 0
        for value in known["throttle_bits"]:
            bits |= value
        worst["throttle_bits"] = bits
    return ClockReading(**worst)


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

    def close(self) -> None:
        """Let go of NVML; safe to call twice."""
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
        self._nvml = self._handle = None


def _throttle_bits(nvml: Any, handle: Any) -> int | None:
    """Ask by the new name, then by the old one: old drivers lack the new function."""
    new = _or_none(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    return new if new is not None else _or_none(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _or_none(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:  # noqa: BLE001  # NVML raises a class per error, and a missing one means only a missing field
        return None
