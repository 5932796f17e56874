"""The parameter blocks of CUPTI's functions, field by field as in its headers.

``tests/measure/test_cupti_structs.py`` compiles a C program against these headers and compares every size and offset.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_void_p
from typing import Any, ClassVar

AUTO_RANGE = 1  # CUPTI_AutoRange: one range per kernel
KERNEL_REPLAY = 2  # CUPTI_KernelReplay: CUPTI itself repeats a kernel that needs more than one pass
RANGE_PROFILER = 0  # CUPTI_PROFILER_TYPE_RANGE_PROFILER
METRIC_TYPES = 3  # CUPTI_METRIC_TYPE__COUNT: counters, ratios, throughputs

_HEAD: tuple[tuple[str, Any], ...] = (("structSize", c_size_t), ("pPriv", c_void_p))
_HOST: tuple[tuple[str, Any], ...] = (*_HEAD, ("pHostObject", c_void_p))
_RANGE: tuple[tuple[str, Any], ...] = (*_HEAD, ("pRangeProfilerObject", c_void_p))
_BYTES = POINTER(c_uint8)
_NAMES = POINTER(c_char_p)


class Params(Structure):
    """A parameter block: what its C type is called, and the function that takes it."""

    c_type: ClassVar[str]
    function: ClassVar[str]


def struct_size(kind: type[Params]) -> int:
    """Return what ``structSize`` must say: up to the end of the last field, without the padding behind it."""
    last = getattr(kind, tuple(kind._fields_)[-1][0])
    return int(last.offset + last.size)


class DeviceGetChipName(Params):
    """Device index in, NVIDIA's name of the die out."""

    c_type, function = "CUpti_Device_GetChipName_Params", "cuptiDeviceGetChipName"
    _fields_ = (*_HEAD, ("deviceIndex", c_size_t), ("pChipName", c_char_p))


class ProfilerInitialize(Params):
    """Hooks the profiler into the driver."""

    c_type, function = "CUpti_Profiler_Initialize_Params", "cuptiProfilerInitialize"
    _fields_ = _HEAD


class ProfilerDeInitialize(Params):
    """The end of ProfilerInitialize."""

    c_type, function = "CUpti_Profiler_DeInitialize_Params", "cuptiProfilerDeInitialize"
    _fields_ = _HEAD


class ProfilerGetCounterAvailability(Params):
    """Which raw counters this device lets us have: asked for its size first, then for the image."""

    c_type, function = "CUpti_Profiler_GetCounterAvailability_Params", "cuptiProfilerGetCounterAvailability"
    _fields_ = (
        *_HEAD,
        ("ctx", c_void_p),
        ("counterAvailabilityImageSize", c_size_t),
        ("pCounterAvailabilityImage", _BYTES),
    )


class HostInitialize(Params):
    """Chip in, host object out."""

    c_type, function = "CUpti_Profiler_Host_Initialize_Params", "cuptiProfilerHostInitialize"
    _fields_ = (
        *_HEAD,
        ("profilerType", c_int),
        ("pChipName", c_char_p),
        ("pCounterAvailabilityImage", _BYTES),
        ("pHostObject", c_void_p),
    )


class HostDeinitialize(Params):
    """Frees a host object."""

    c_type, function = "CUpti_Profiler_Host_Deinitialize_Params", "cuptiProfilerHostDeinitialize"
    _fields_ = _HOST


class HostGetBaseMetrics(Params):
    """All base metrics of one type."""

    c_type, function = "CUpti_Profiler_Host_GetBaseMetrics_Params", "cuptiProfilerHostGetBaseMetrics"
    _fields_ = (*_HOST, ("metricType", c_int), ("ppMetricNames", _NAMES), ("numMetrics", c_size_t))


class HostGetMetricProperties(Params):
    """A metric's description, unit of hardware and unit of measurement."""

    c_type, function = "CUpti_Profiler_Host_GetMetricProperties_Params", "cuptiProfilerHostGetMetricProperties"
    _fields_ = (
        *_HOST,
        ("pMetricName", c_char_p),
        ("pDescription", c_char_p),
        ("pHwUnit", c_char_p),
        ("pDimUnit", c_char_p),
        ("metricType", c_int),
    )


class HostConfigAddMetrics(Params):
    """Metrics to be scheduled."""

    c_type, function = "CUpti_Profiler_Host_ConfigAddMetrics_Params", "cuptiProfilerHostConfigAddMetrics"
    _fields_ = (*_HOST, ("ppMetricNames", _NAMES), ("numMetrics", c_size_t))


class HostGetConfigImageSize(Params):
    """The bytes of the schedule."""

    c_type, function = "CUpti_Profiler_Host_GetConfigImageSize_Params", "cuptiProfilerHostGetConfigImageSize"
    _fields_ = (*_HOST, ("configImageSize", c_size_t))


class HostGetConfigImage(Params):
    """The schedule itself."""

    c_type, function = "CUpti_Profiler_Host_GetConfigImage_Params", "cuptiProfilerHostGetConfigImage"
    _fields_ = (*_HOST, ("configImageSize", c_size_t), ("pConfigImage", _BYTES))


class HostGetNumOfPasses(Params):
    """How often a kernel must run for a schedule."""

    c_type, function = "CUpti_Profiler_Host_GetNumOfPasses_Params", "cuptiProfilerHostGetNumOfPasses"
    _fields_ = (*_HEAD, ("configImageSize", c_size_t), ("pConfigImage", _BYTES), ("numOfPasses", c_size_t))


class HostEvaluateToGpuValues(Params):
    """One range's values of the named metrics."""

    c_type, function = "CUpti_Profiler_Host_EvaluateToGpuValues_Params", "cuptiProfilerHostEvaluateToGpuValues"
    _fields_ = (
        *_HOST,
        ("pCounterDataImage", _BYTES),
        ("counterDataImageSize", c_size_t),
        ("rangeIndex", c_size_t),
        ("ppMetricNames", _NAMES),
        ("numMetrics", c_size_t),
        ("pMetricValues", c_void_p),  # double *
    )


class RangeEnable(Params):
    """CUDA context in, range profiler out."""

    c_type, function = "CUpti_RangeProfiler_Enable_Params", "cuptiRangeProfilerEnable"
    _fields_ = (*_HEAD, ("ctx", c_void_p), ("pRangeProfilerObject", c_void_p))


class RangeDisable(Params):
    """Frees a range profiler."""

    c_type, function = "CUpti_RangeProfiler_Disable_Params", "cuptiRangeProfilerDisable"
    _fields_ = _RANGE


class RangeGetCounterDataSize(Params):
    """The bytes that the counters of so many ranges need."""

    c_type, function = "CUpti_RangeProfiler_GetCounterDataSize_Params", "cuptiRangeProfilerGetCounterDataSize"
    _fields_ = (
        *_RANGE,
        ("pMetricNames", _NAMES),
        ("numMetrics", c_size_t),
        ("maxNumOfRanges", c_size_t),
        ("maxNumRangeTreeNodes", c_uint32),
        ("counterDataSize", c_size_t),
    )


class RangeCounterDataImageInitialize(Params):
    """Empties the image of counters."""

    c_type = "CUpti_RangeProfiler_CounterDataImage_Initialize_Params"
    function = "cuptiRangeProfilerCounterDataImageInitialize"
    _fields_ = (*_RANGE, ("counterDataSize", c_size_t), ("pCounterData", _BYTES))


class RangeSetConfig(Params):
    """What is to be counted, how ranges come about, and where the counters go."""

    c_type, function = "CUpti_RangeProfiler_SetConfig_Params", "cuptiRangeProfilerSetConfig"
    _fields_ = (
        *_RANGE,
        ("configSize", c_size_t),
        ("pConfig", _BYTES),
        ("counterDataImageSize", c_size_t),
        ("pCounterDataImage", _BYTES),
        ("range", c_int),
        ("replayMode", c_int),
        ("maxRangesPerPass", c_size_t),
        ("numNestingLevels", c_uint16),
        ("minNestingLevel", c_uint16),
        ("passIndex", c_size_t),
        ("targetNestingLevel", c_uint16),
    )


class RangeStart(Params):
    """From here on launches are counted."""

    c_type, function = "CUpti_RangeProfiler_Start_Params", "cuptiRangeProfilerStart"
    _fields_ = _RANGE


class RangeStop(Params):
    """Up to here; says whether every pass was run."""

    c_type, function = "CUpti_RangeProfiler_Stop_Params", "cuptiRangeProfilerStop"
    _fields_ = (*_RANGE, ("passIndex", c_size_t), ("targetNestingLevel", c_size_t), ("isAllPassSubmitted", c_uint8))


class RangePushRange(Params):
    """The begin of a named range."""

    c_type, function = "CUpti_RangeProfiler_PushRange_Params", "cuptiRangeProfilerPushRange"
    _fields_ = (*_RANGE, ("pRangeName", c_char_p))


class RangePopRange(Params):
    """The end of the last range that was pushed."""

    c_type, function = "CUpti_RangeProfiler_PopRange_Params", "cuptiRangeProfilerPopRange"
    _fields_ = _RANGE


class RangeDecodeData(Params):
    """Moves counters from the hardware into the image."""

    c_type, function = "CUpti_RangeProfiler_DecodeData_Params", "cuptiRangeProfilerDecodeData"
    _fields_ = (*_RANGE, ("numOfRangeDropped", c_size_t))


class RangeGetCounterDataInfo(Params):
    """How many ranges the image holds."""

    c_type, function = "CUpti_RangeProfiler_GetCounterDataInfo_Params", "cuptiRangeProfilerGetCounterDataInfo"
    _fields_ = (
        *_HEAD,
        ("pCounterDataImage", _BYTES),
        ("counterDataImageSize", c_size_t),
        ("numTotalRanges", c_size_t),
    )


ALL: tuple[type[Params], ...] = tuple(Params.__subclasses__())
