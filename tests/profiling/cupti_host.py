"""Ask CUPTI's host library about metrics of any chip: needs neither a GPU nor a driver.

The library is the pip package ``nvidia-cuda-cupti``. A chip is named as NVIDIA names the die, e.g. ``GH100``.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint8, c_void_p
from functools import lru_cache
from typing import Any, Self

DISTRIBUTION = "nvidia-cuda-cupti"
RANGE_PROFILER = 0  # CUPTI_PROFILER_TYPE_RANGE_PROFILER


class CuptiError(RuntimeError):
    """A CUPTI call failed."""


class _Initialize(Structure):
    _fields_ = (
        ("structSize", c_size_t),
        ("pPriv", c_void_p),
        ("profilerType", c_int),
        ("pChipName", c_char_p),
        ("pCounterAvailabilityImage", c_void_p),
        ("pHostObject", c_void_p),
    )


class _Deinitialize(Structure):
    _fields_ = (("structSize", c_size_t), ("pPriv", c_void_p), ("pHostObject", c_void_p))


class _Properties(Structure):
    _fields_ = (
        ("structSize", c_size_t),
        ("pPriv", c_void_p),
        ("pHostObject", c_void_p),
        ("pMetricName", c_char_p),
        ("pDescription", c_char_p),
        ("pHwUnit", c_char_p),
        ("pDimUnit", c_char_p),
        ("metricType", c_int),
    )


class _BaseMetrics(Structure):
    _fields_ = (
        ("structSize", c_size_t),
        ("pPriv", c_void_p),
        ("pHostObject", c_void_p),
        ("metricType", c_int),
        ("ppMetricNames", POINTER(c_char_p)),
        ("numMetrics", c_size_t),
    )


class _AddMetrics(Structure):
    _fields_ = (
        ("structSize", c_size_t),
        ("pPriv", c_void_p),
        ("pHostObject", c_void_p),
        ("ppMetricNames", POINTER(c_char_p)),
        ("numMetrics", c_size_t),
    )


class _ImageSize(Structure):
    _fields_ = (
        ("structSize", c_size_t),
        ("pPriv", c_void_p),
        ("pHostObject", c_void_p),
        ("configImageSize", c_size_t),
    )


class _Image(Structure):
    _fields_ = (
        ("structSize", c_size_t),
        ("pPriv", c_void_p),
        ("pHostObject", c_void_p),
        ("configImageSize", c_size_t),
        ("pConfigImage", POINTER(c_uint8)),
    )


class _Passes(Structure):
    _fields_ = (
        ("structSize", c_size_t),
        ("pPriv", c_void_p),
        ("configImageSize", c_size_t),
        ("pConfigImage", POINTER(c_uint8)),
        ("numOfPasses", c_size_t),
    )


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """Load libcupti out of the installed wheel; raises PackageNotFoundError where it is not installed."""
    files = importlib.metadata.files(DISTRIBUTION) or []
    found = [file for file in files if file.name.startswith("libcupti.so")]
    if not found:
        raise CuptiError(f"{DISTRIBUTION} holds no libcupti.so")
    return ctypes.CDLL(str(found[0].locate()))


def _call(name: str, params: Any) -> int:
    last = getattr(type(params), params._fields_[-1][0])
    params.structSize = last.offset + last.size  # as CUPTI's macro counts it: without the padding at the end
    return getattr(_library(), name)(byref(params))


def _checked(name: str, params: Any) -> None:
    code = _call(name, params)
    if code != 0:
        raise CuptiError(f"{name} returned {code}")


class Chip:
    """One chip's host object; use as a context manager."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._host = c_void_p()

    def __enter__(self) -> Self:
        params = _Initialize(profilerType=RANGE_PROFILER, pChipName=self.name.encode())
        _checked("cuptiProfilerHostInitialize", params)
        self._host = c_void_p(params.pHostObject)
        return self

    def __exit__(self, *_: object) -> None:
        _checked("cuptiProfilerHostDeinitialize", _Deinitialize(pHostObject=self._host))

    def has(self, metric: str) -> bool:
        """Whether the chip has the metric, suffixes included."""
        params = _Properties(pHostObject=self._host, pMetricName=metric.encode())
        return _call("cuptiProfilerHostGetMetricProperties", params) == 0

    def describe(self, metric: str) -> str:
        """Return NVIDIA's one-line description of the metric."""
        params = _Properties(pHostObject=self._host, pMetricName=metric.encode())
        _checked("cuptiProfilerHostGetMetricProperties", params)
        return (params.pDescription or b"").decode()

    def base_metrics(self) -> list[str]:
        """Return every base name (counters, ratios and throughputs)."""
        names: list[str] = []
        for kind in range(3):
            params = _BaseMetrics(pHostObject=self._host, metricType=kind)
            _checked("cuptiProfilerHostGetBaseMetrics", params)
            names += [params.ppMetricNames[index].decode() for index in range(params.numMetrics)]
        return names

    def passes(self, metrics: Sequence[str]) -> int:
        """Return how often a kernel must run to collect all of ``metrics``. Adds to what was asked before: one set per host."""
        names = (c_char_p * len(metrics))(*(metric.encode() for metric in metrics))
        add = _AddMetrics(pHostObject=self._host, ppMetricNames=names, numMetrics=len(metrics))
        _checked("cuptiProfilerHostConfigAddMetrics", add)
        size = _ImageSize(pHostObject=self._host)
        _checked("cuptiProfilerHostGetConfigImageSize", size)
        buffer = (c_uint8 * size.configImageSize)()
        image = _Image(pHostObject=self._host, configImageSize=size.configImageSize, pConfigImage=buffer)
        _checked("cuptiProfilerHostGetConfigImage", image)
        passes = _Passes(configImageSize=size.configImageSize, pConfigImage=buffer)
        _checked("cuptiProfilerHostGetNumOfPasses", passes)
        return passes.numOfPasses
