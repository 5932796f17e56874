"""Watches a GPU through NVML from outside the process that uses it: how busy, at which clock, how much memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from moetune.errors import MissingError
from moetune.measure.gpu_name import Gpu

PAUSE_S = 0.05  # between two looks
LONGEST_S = 1.0  # that one reading stands for: NVML's longest period of a sample
SKEW_S = 30.0  # a buffered sample further from this machine's clock is stamped by another clock
_VALUES = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal"}  # by NVML's type of a sample's value

Reading = tuple[float, float]  # seconds since the epoch; the value over the time up to then


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over a window, and the share of the window that readings cover."""

    value: float
    covered: float


def mean_over(readings: Sequence[Reading], window: tuple[float, float]) -> Mean | None:
    """Return the mean over a window, each reading weighted by the time since the one before; None where none falls in.

    >>> mean_over([(0.0, 0.0), (1.0, 80.0), (1.5, 100.0), (2.0, 100.0)], (0.5, 2.0))
    Mean(value=93.33333333333333, covered=1.0)
    """
    begin, end = window
    weighted = weight = 0.0
    for (before, _), (at, value) in pairwise(readings):
        share = max(min(at, end) - max(before, begin, at - LONGEST_S), 0.0)
        weighted, weight = weighted + share * value, weight + share
    return Mean(weighted / weight, weight / (end - begin)) if weight else None


class Nvml:
    """One GPU as NVML sees it.

    Args:
        gpu: which one; NVML ignores CUDA_VISIBLE_DEVICES, so it is found by its UUID.
        nvml: the module, pynvml when None.
        clock: tells the seconds since the epoch.

    Raises:
        MissingError: NVML is not there or does not know the GPU.
    """

    def __init__(self, gpu: Gpu, nvml: Any = None, clock: Callable[[], float] = time.time) -> None:
        try:
            if nvml is None:
                import pynvml as nvml
            nvml.nvmlInit()
            if gpu.uuid:
                self._handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            else:
                self._handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        except Exception as error:  # NVML raises a class per error, and any of them means that nothing can be watched
            raise MissingError(f"NVML does not show {gpu}: {error}; run `moetune doctor`") from error
        self._nvml, self._clock = nvml, clock
        self._seen_us = 0
        self.has_samples: bool | None = None  # None: not known before the first one came

    @property
    def how(self) -> str:
        """How utilization is read, for the results."""
        return "samples" if self.has_samples else "rates"

    def busy(self) -> list[Reading]:
        """Return the percent of time with a kernel on the GPU: every sample since the last call, or the latest rate."""
        if self.has_samples is not False:
            found = self._samples()
            if found is not None:
                return found
            self.has_samples = False
        try:
            return [(self._clock(), float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu))]
        except self._nvml.NVMLError:
            return []

    def _samples(self) -> list[Reading] | None:
        """Return the driver's own samples that are new; None where it keeps none, or stamps them by another clock."""
        nvml = self._nvml
        try:
            kind, found = nvml.nvmlDeviceGetSamples(self._handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._seen_us)
        except nvml.NVMLError as error:
            is_empty = getattr(error, "value", None) == nvml.NVML_ERROR_NOT_FOUND
            return [] if is_empty and self.has_samples else None
        new = [
            (one.timeStamp, float(getattr(one.sampleValue, _VALUES.get(kind, "uiVal"))))
            for one in found
            if one.timeStamp > self._seen_us
        ]
        if not new:
            return [] if self.has_samples else None
        self._seen_us = max(stamp for stamp, _ in new)
        if abs(self._seen_us / 1e6 - self._clock()) > SKEW_S:
            return None
        self.has_samples = True
        return sorted((stamp / 1e6, value) for stamp, value in new)

    def sm_mhz(self) -> list[Reading]:
        """Return the SM clock now; nothing where NVML is silent."""
        nvml = self._nvml
        try:
            return [(self._clock(), float(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)))]
        except nvml.NVMLError:
            return []

    def memory_bytes(self) -> tuple[int, int]:
        """Return the bytes of the whole card that are used, and all that it has.

        Raises:
            MissingError: NVML does not say.
        """
        try:
            found = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError as error:
            raise MissingError(f"NVML does not tell the GPU's memory: {error}") from error
        return int(found.used), int(found.total)


class GpuWatch:
    """Looks at a GPU again and again in a thread of its own, for as long as the block lasts.

    Attributes:
        busy: percent of time with a kernel on the GPU.
        sm_mhz: the SM clock.
    """

    def __init__(self, nvml: Nvml, pause_s: float = PAUSE_S) -> None:
        self._nvml, self._pause_s = nvml, pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.busy: list[Reading] = []
        self.sm_mhz: list[Reading] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def how(self) -> str:
        """How utilization was read."""
        return self._nvml.how

    def _watch(self) -> None:
        while True:
            last = self._stop.wait(self._pause_s)
            self.busy += self._nvml.busy()
            self.sm_mhz += self._nvml.sm_mhz()
            if last:
                return
