"""CUPTI's host object: schedules metrics for a chip and evaluates what was counted. Needs neither a GPU nor a driver.

A chip is named as NVIDIA names the die, e.g. ``GH100``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_uint8, c_void_p, cast
from dataclasses import dataclass
from typing import Any, Self

from moetune.measure.cupti.library import Cupti, CuptiError
from moetune.measure.cupti.structs import (
    METRIC_TYPES,
    RANGE_PROFILER,
    HostConfigAddMetrics,
    HostDeinitialize,
    HostEvaluateToGpuValues,
    HostGetBaseMetrics,
    HostGetConfigImage,
    HostGetConfigImageSize,
    HostGetMetricProperties,
    HostGetNumOfPasses,
    HostInitialize,
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a list of metrics is collected: CUPTI's config image, and how often a kernel must run for it."""

    image: Any
    passes: int


@dataclass(frozen=True, slots=True)
class Metric:
    """What CUPTI says of one metric: a description, and its unit as a word, e.g. ``byte`` or ``gpc_cycle/second``."""

    description: str
    unit: str


class HostProfiler:
    """One chip's host object; use as a context manager.

    Args:
        cupti: the library.
        chip: the die.
        availability: which raw counters the device at hand has; those of a whole, free one when None.

    Raises:
        CuptiError: on entry, when the library does not know the chip.
    """

    def __init__(self, cupti: Cupti, chip: str, availability: Any = None) -> None:
        self._cupti, self._chip, self._availability = cupti, chip, availability
        self._object = c_void_p()

    def __enter__(self) -> Self:
        params = HostInitialize(profilerType=RANGE_PROFILER, pChipName=self._chip.encode())
        if self._availability is not None:
            params.pCounterAvailabilityImage = self._availability
        self._cupti.call(params)
        self._object = c_void_p(params.pHostObject)
        return self

    def __exit__(self, *_: object) -> None:
        self._cupti.status(HostDeinitialize(pHostObject=self._object))  # an error here must not hide the first one

    def has(self, metric: str) -> bool:
        """Whether the chip has the metric, suffixes included."""
        return self._cupti.status(HostGetMetricProperties(pHostObject=self._object, pMetricName=metric.encode())) == 0

    def describe(self, metric: str) -> Metric:
        """Return what CUPTI says of a metric. Raises CuptiError: the chip has no such metric."""
        params = HostGetMetricProperties(pHostObject=self._object, pMetricName=metric.encode())
        self._cupti.call(params)
        return Metric((params.pDescription or b"").decode(), (params.pDimUnit or b"").decode())

    def base_metrics(self) -> list[str]:
        """Return every base name (counters, ratios and throughputs)."""
        names: list[str] = []
        for kind in range(METRIC_TYPES):
            params = HostGetBaseMetrics(pHostObject=self._object, metricType=kind)
            self._cupti.call(params)
            names += [params.ppMetricNames[index].decode() for index in range(params.numMetrics)]
        return names

    def schedule(self, metrics: Sequence[str]) -> Schedule:
        """Schedule ``metrics``, once in the life of a host object: CUPTI adds to what it was asked before.

        Raises:
            CuptiError: the chip lacks one of them, and the message names it: CUPTI itself would only say that a
                parameter is wrong.
        """
        lacking = [metric for metric in metrics if not self.has(metric)]
        if lacking:
            raise CuptiError(f"CUPTI knows no metric {lacking[0]} on a {self._chip}")
        names = c_names(metrics)
        self._cupti.call(HostConfigAddMetrics(pHostObject=self._object, ppMetricNames=names, numMetrics=len(names)))
        size = HostGetConfigImageSize(pHostObject=self._object)
        self._cupti.call(size)
        image = (c_uint8 * size.configImageSize)()
        self._cupti.call(HostGetConfigImage(pHostObject=self._object, configImageSize=len(image), pConfigImage=image))
        passes = HostGetNumOfPasses(configImageSize=len(image), pConfigImage=image)
        self._cupti.call(passes)
        return Schedule(image, passes.numOfPasses)

    def evaluate(self, counter_data: Any, index: int, metrics: Sequence[str]) -> dict[str, float]:
        """Return the values of one range, in base units: bytes, nanoseconds, cycles, percent. What is not finite is left out.

        Args:
            counter_data: the image that the range profiler decoded into.
            index: which of its ranges.
            metrics: full names; all must have been scheduled.
        """
        names, values = c_names(metrics), (c_double * len(metrics))()
        self._cupti.call(
            HostEvaluateToGpuValues(
                pHostObject=self._object,
                pCounterDataImage=counter_data,
                counterDataImageSize=len(counter_data),
                rangeIndex=index,
                ppMetricNames=names,
                numMetrics=len(names),
                pMetricValues=cast(values, c_void_p),
            )
        )
        return {name: value for name, value in zip(metrics, values, strict=True) if math.isfinite(value)}


def c_names(metrics: Sequence[str]) -> Any:
    """Return ``metrics`` as a C array of strings, which keeps them alive."""
    return (c_char_p * len(metrics))(*(metric.encode() for metric in metrics))
