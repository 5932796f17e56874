"""The process that counts launches itself, by CUPTI (see :mod:`moetune.measure.counter_jobs`).

Started as ``python -m moetune.measure.cupti_worker WAIT_S JOBS LAUNCHES CHIP METRICS L2_BYTES``, with the metrics joined
by commas and the chip as its die is called. Before each profiled launch the L2 is made cold as the timer does it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from moetune.measure import gpu_driver
from moetune.measure.counter_jobs import Calls, Phases, Tell, serve
from moetune.measure.cupti import library
from moetune.measure.cupti.host import HostProfiler
from moetune.measure.cupti.library import Cupti, CuptiError
from moetune.measure.cupti.ranges import RangeProfiler
from moetune.measure.timer import Timer, finish
from moetune_kernels.kernel_call import KernelCall


class ByCupti:
    """Counts each launch in a range of its own, behind a flush that is not counted.

    Args:
        chip: the die that is expected: asked of the host library before there is a GPU.
        metrics: full names.
        l2_bytes: the device's L2.
    """

    def __init__(self, chip: str, metrics: Sequence[str], l2_bytes: int) -> None:
        self._chip, self._metrics, self._l2_bytes = chip, metrics, l2_bytes
        self._open = ExitStack()
        self._cupti: Cupti | None = None
        self._profiler: RangeProfiler | None = None
        self._timer: Timer | None = None
        self._phases = Phases()

    def load(self) -> None:
        """Load CUPTI and schedule the metrics for the expected chip. Raises CuptiError: it cannot."""
        self._cupti = library.load()
        with HostProfiler(self._cupti, self._chip) as host:
            passes = host.schedule(self._metrics).passes
        if passes != 1:
            raise CuptiError(f"the metrics need {passes} passes over a kernel of a {self._chip}, not one")

    def begin(self) -> None:
        """Enable CUPTI's profiler on the current device. Raises CuptiError: it cannot."""
        if self._profiler is not None:
            return
        assert self._cupti is not None
        torch.cuda.synchronize()  # makes the context that CUPTI counts on
        try:
            driver = gpu_driver.opened()
        except (OSError, gpu_driver.DriverError) as error:
            raise CuptiError(f"the CUDA driver does not answer: {error}") from None
        self._profiler = self._open.enter_context(RangeProfiler(self._cupti, driver, self._metrics))

    def count(self, calls: Calls, tell: Tell) -> None:
        """Launch each call once, cold, and tell its values."""
        assert self._profiler is not None
        for part, call in calls:
            tell(part, call, self._profiler.count(partial(_launch, call), self._flush))

    def _flush(self) -> None:
        """Make the L2 cold, as the timer does."""
        if self._timer is None:
            self._timer = Timer(torch.device("cuda", torch.cuda.current_device()), self._l2_bytes)
        with self._phases.phase("flushes"):
            self._timer.cool()
            finish()

    def spent(self) -> Mapping[str, float]:
        """Return the seconds of the flushes and of each function of CUPTI; they are parts of the phases."""
        assert self._cupti is not None
        return self._phases.seconds | dict(self._cupti.seconds)

    def close(self) -> None:
        """Disable the profiler."""
        self._open.close()


def _launch(call: KernelCall) -> None:
    call.launch()
    finish()  # the wait has a limit, CUPTI's own has none


def main() -> None:
    """Serve the jobs that the command line names."""
    wait_s, jobs, launches, chip, metrics, l2_bytes = sys.argv[1:]
    counting = ByCupti(chip, metrics.split(","), int(l2_bytes))
    serve(float(wait_s), Path(jobs), Path(launches), counting)
    counting.close()
    # The sweep waits for the end, and the driver frees all memory at once where torch would do so piece by piece.
    os._exit(0)


if __name__ == "__main__":
    main()
