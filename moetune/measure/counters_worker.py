"""The process that runs under ncu: launches between cudaProfilerStart and -Stop (see :mod:`moetune.measure.counter_jobs`).

Started as ``ncu … python -m moetune.measure.counters_worker WAIT_S JOBS LAUNCHES``; ncu prints its rows when it ends.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.cuda.profiler

from moetune.measure.counter_jobs import Calls, Tell, serve


class UnderNcu:
    """ncu counts from outside: it flushes the caches before each launch, waits for it, and prints values at the end."""

    def load(self) -> None:
        """Nothing is needed."""

    def begin(self) -> None:
        """Nothing is needed."""

    def count(self, calls: Calls, tell: Tell) -> None:
        """Launch each call once in a profiled block."""
        with _profiled():
            for part, call in calls:
                call.launch()
                tell(part, call, None)

    def spent(self) -> Mapping[str, float]:
        """Nothing beyond the phases."""
        return {}


@contextlib.contextmanager
def _profiled() -> Iterator[None]:
    """Have ncu count the launches of the block, one by one: it waits for each."""
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


def main() -> None:
    """Serve the jobs that the command line names."""
    serve(float(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), UnderNcu())


if __name__ == "__main__":
    main()
