"""One ncu with its worker, and the folder that they share with us: started at once, or long before its jobs are known.

The worker waits for files that appear in the folder, whole: a profiler need not pass on any input. WAKE lets it start
CUDA, while a process of ours still gives its memory back; JOBS lets it begin. It notes its launches in LAUNCHES, which
it makes when it takes the jobs.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetune.measure.ncu import NcuProcess, NcuRun
from moetune.outcome import Failed

WORKER = "moetune.measure.counters_worker"
JOBS, LAUNCHES, WAKE = "jobs.json", "launches.jsonl", "wake.json"
GRACE_S = 5.0  # the processes' own time limit is that much later than ours, which says more
WAIT_LIMIT_S = 900.0  # for jobs: a worker of a sweep that goes on for so long is not kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What a run left: the worker's notes, what ncu printed, and whether the worker ever took its jobs."""

    launches: list[Mapping[str, Any]]
    ncu: NcuRun
    taken: bool


class CountersRun:
    """Reads one set of metrics once. :meth:`start` and :meth:`tell` in any order, then :meth:`finish`.

    Args:
        names: field -> metric of the set.

    Raises:
        OSError: no folder can be made.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)
        # An ncu that had to be killed may still be writing.
        self._folder = tempfile.TemporaryDirectory(prefix="moetune-counters-", ignore_cleanup_errors=True)
        self._path = Path(self._folder.name)
        self._process: NcuProcess | None = None

    def start(self, limit_s: float, wait_s: float = 0.0) -> None:
        """Start ncu and the worker, which waits up to ``wait_s`` for its jobs, and then has ``limit_s`` for them.

        Raises:
            OSError: it cannot be started.
        """
        files = [str(self._path / JOBS), str(self._path / LAUNCHES)]
        metrics = list(self.names.values())
        self._process = NcuProcess(metrics, WORKER, [str(wait_s), *files], self._path, wait_s + limit_s + GRACE_S)

    def wake(self, device_index: int) -> None:
        """Let the worker start CUDA; it allocates next to nothing on the GPU before it has jobs. Raises OSError."""
        self._show(WAKE, {"device_index": device_index})

    def tell(self, request: Mapping[str, Any]) -> None:
        """Let the worker begin. Raises OSError: the jobs cannot be written."""
        self._show(JOBS, request)

    def finish(self, limit_s: float) -> Counted | Failed:
        """Wait for the end, up to ``limit_s``, and return what was noted and printed; it must have been started."""
        assert self._process is not None
        run = self._process.finish(limit_s)
        if isinstance(run, Failed):
            return run
        notes = self._path / LAUNCHES
        lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
        return Counted(launches=[json.loads(line) for line in lines], ncu=run, taken=notes.exists())

    def close(self) -> None:
        """End what still runs and remove the folder; safe to call twice."""
        if self._process is not None:
            self._process.end()
        self._folder.cleanup()

    def _show(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a file that appears in the folder whole; without a folder there is no worker any more either."""
        written = self._path / f"{name}.part"
        with contextlib.suppress(FileNotFoundError):
            written.write_text(json.dumps(value), encoding="utf-8")
            written.replace(self._path / name)
