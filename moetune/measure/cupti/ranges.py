"""CUPTI's range profiler: the counters of single launches on the current CUDA context.

Ranges are *automatic*, one per kernel: a range that is pushed by hand lasts from the host's push to its pop, and so would
its duration. Kernel replay is the mode that goes with them; a schedule of one pass repeats nothing. A session is started
and stopped around one launch, so that what is launched elsewhere, such as a flush of the caches, is not counted. NVIDIA's
manual pushes a range all the same in this mode, and reports of others say that nothing is counted without.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from ctypes import c_uint8, c_void_p
from typing import Any, Self

from moetune.measure.cupti.host import HostProfiler, c_names
from moetune.measure.cupti.library import Cupti, CuptiError
from moetune.measure.cupti.structs import (
    AUTO_RANGE,
    KERNEL_REPLAY,
    DeviceGetChipName,
    ProfilerDeInitialize,
    ProfilerGetCounterAvailability,
    ProfilerInitialize,
    RangeCounterDataImageInitialize,
    RangeDecodeData,
    RangeDisable,
    RangeEnable,
    RangeGetCounterDataInfo,
    RangeGetCounterDataSize,
    RangePopRange,
    RangePushRange,
    RangeSetConfig,
    RangeStart,
    RangeStop,
)
from moetune.measure.gpu_driver import DriverError, call

ROOM = 8  # ranges: more than the one that a launch makes, so that a second one is seen and not dropped


class RangeProfiler:
    """Counts launches on the CUDA context that is current on entry; use as a context manager.

    Args:
        cupti: the library.
        driver: libcuda, initialised.
        metrics: full metric names, which must fit one pass on this chip.

    Raises:
        CuptiError: on entry, when the chip, the driver or somebody else's profiler does not allow it.
    """

    def __init__(self, cupti: Cupti, driver: Any, metrics: Sequence[str]) -> None:
        self._cupti, self._driver, self._metrics = cupti, driver, list(metrics)
        self._open = ExitStack()
        self._object = c_void_p()
        self._configured, self._reusable = False, True

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self._enter(undo)
            self._open = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _enter(self, undo: ExitStack) -> None:
        cupti = self._cupti
        cupti.call(ProfilerInitialize())
        undo.callback(cupti.status, ProfilerDeInitialize())  # an error here must not hide the first one
        context, device = self._current()
        chip = DeviceGetChipName(deviceIndex=device)
        cupti.call(chip)
        # Before the profiler is enabled: this may fail while a session is active.
        availability = self._availability(context)
        self._host = undo.enter_context(HostProfiler(cupti, (chip.pChipName or b"").decode(), availability))
        self._schedule = self._host.schedule(self._metrics)
        if self._schedule.passes != 1:
            raise CuptiError(f"the metrics need {self._schedule.passes} passes over a kernel on this chip, not one")
        enable = RangeEnable(ctx=context)
        cupti.call(enable)
        self._object = c_void_p(enable.pRangeProfilerObject)
        undo.callback(cupti.status, RangeDisable(pRangeProfilerObject=self._object))
        size = RangeGetCounterDataSize(
            pRangeProfilerObject=self._object,
            pMetricNames=c_names(self._metrics),
            numMetrics=len(self._metrics),
            maxNumOfRanges=ROOM,
            maxNumRangeTreeNodes=ROOM,
        )
        cupti.call(size)
        self._data = (c_uint8 * size.counterDataSize)()

    def count(self, launch: Callable[[], object], before: Callable[[], object] = lambda: None) -> dict[str, float]:
        """Return the values of the one kernel that ``launch`` launches, by metric, in base units.

        Args:
            launch: launches one kernel and waits for it. Nothing else may run on the context, or the count is refused.
                It must bear to be launched again, which may happen once in the life of a profiler.
            before: called before each launch; what it launches is not counted if it waits for it.

        Raises:
            CuptiError: CUPTI failed, or counted anything but one kernel.
            Exception: ``launch`` or ``before`` failed.
        """
        # Whether a session may be started again when all its passes are done is not documented, so it is tried once.
        if self._configured and self._reusable:
            with suppress(CuptiError):
                self._empty()
                return self._session(launch, before)
            self._reusable = False
        self._configured = False
        self._empty()
        self._configure()
        values = self._session(launch, before)
        self._configured = True
        return values

    def _session(self, launch: Callable[[], object], before: Callable[[], object]) -> dict[str, float]:
        """Count one launch in a session of its own, into an image that is empty."""
        before()
        self._call(RangeStart)
        try:
            push = RangePushRange(pRangeProfilerObject=self._object, pRangeName=b"launch")
            pushed = self._cupti.status(push) == 0  # where it must be and is not, no kernel will have been counted
            launch()
            if pushed:
                self._call(RangePopRange)
        except BaseException:
            with suppress(CuptiError):
                self._call(RangeStop)
            raise
        if not self._call(RangeStop).isAllPassSubmitted:
            raise CuptiError("CUPTI wants a kernel repeated that was scheduled for one pass")
        dropped = self._call(RangeDecodeData).numOfRangeDropped
        info = RangeGetCounterDataInfo(pCounterDataImage=self._data, counterDataImageSize=len(self._data))
        self._cupti.call(info)
        if dropped or info.numTotalRanges != 1:
            raise CuptiError(f"CUPTI counted {info.numTotalRanges + dropped} kernels where one was launched")
        values = self._host.evaluate(self._data, 0, self._metrics)
        if not any(values.values()):
            raise CuptiError("CUPTI counted nothing: every value is zero")
        if min(values.values()) < 0:
            raise CuptiError(f"CUPTI counted less than nothing: {min(values, key=values.__getitem__)} is negative")
        return values

    def _empty(self) -> None:
        self._call(RangeCounterDataImageInitialize, counterDataSize=len(self._data), pCounterData=self._data)

    def _configure(self) -> None:
        image = self._schedule.image
        self._call(
            RangeSetConfig,
            configSize=len(image),
            pConfig=image,
            counterDataImageSize=len(self._data),
            pCounterDataImage=self._data,
            range=AUTO_RANGE,
            replayMode=KERNEL_REPLAY,
            maxRangesPerPass=ROOM,
            numNestingLevels=1,
            minNestingLevel=1,
            passIndex=0,
            targetNestingLevel=0,
        )

    def _call(self, kind: Any, **values: Any) -> Any:
        """Call a function of the range profiler and return its parameters, which hold the answers."""
        params = kind(pRangeProfilerObject=self._object, **values)
        self._cupti.call(params)
        return params

    def _current(self) -> tuple[c_void_p, int]:
        context, device = c_void_p(), ctypes.c_int()
        try:
            call(self._driver.cuCtxGetCurrent, ctypes.byref(context))
            if not context:
                raise CuptiError("no CUDA context is current, so there is nothing to count on")
            call(self._driver.cuCtxGetDevice, ctypes.byref(device))
        except DriverError as error:
            raise CuptiError(f"the CUDA driver does not say which device is current: {error}") from None
        return context, device.value

    def _availability(self, context: c_void_p) -> Any:
        asked = ProfilerGetCounterAvailability(ctx=context)
        self._cupti.call(asked)
        image = (c_uint8 * asked.counterAvailabilityImageSize)()
        asked.pCounterAvailabilityImage = image
        self._cupti.call(asked)
        return image
