"""One process that counts launches, and the folder that it shares with us: started at once, or long before its jobs are known.

The worker waits for files that appear in the folder, whole: a profiler need not pass on any input. WAKE lets it start
CUDA, while a process of ours still gives its memory back; JOBS lets it begin. It notes its launches in LAUNCHES, which
it makes when it takes the jobs, or when it sees that it cannot count here.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moetune.measure.counter_rights import Blocked
from moetune.measure.leashed import Ended, LeashedProcess
from moetune.measure.ncu_csv import LaunchRow
from moetune.outcome import Failed, FailureKind
from moetune_kernels.device import DeviceInfo

JOBS, LAUNCHES, WAKE = "jobs.json", "launches.jsonl", "wake.json"
GRACE_S = 5.0  # the processes' own time limit is that much later than ours, which says more
WAIT_LIMIT_S = 900.0  # for jobs: a worker of a sweep that goes on for so long is not kept

Note = Mapping[str, Any]


class CounterWay(Protocol):
    """One way to read hardware counters: which program counts, and how to read what it left."""

    @property
    def title(self) -> str:
        """What the way is called in a sentence."""
        ...

    def blocked(self, device: DeviceInfo | None) -> Blocked | None:
        """Say what is known to forbid this way on ``device`` (None: whichever), or None; starts nothing."""
        ...

    def readable(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the fields of a set, and their metrics, that this way can read."""
        ...

    def command(self, metrics: Sequence[str], device: DeviceInfo, folder: Path, arguments: Sequence[str]) -> list[str]:
        """Return the command line of its worker, which takes ``arguments`` first. Raises OSError: there is no program."""
        ...

    def rows(self, notes: Sequence[Note], folder: Path) -> list[LaunchRow]:
        """Return what was counted, in the order of the launches."""
        ...

    def explain(self, ended: Ended, notes: Sequence[Note], folder: Path) -> Failed:
        """Say in one sentence why launches were not counted."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What a run left.

    Args:
        title: the way that it was counted.
        launches: the worker's notes: ``{job, part, kernel}`` per profiled launch, ``{job, done}`` or ``{job, failed}``
            as a job ends.
        rows: what was counted, in the order of the launches.
        lack: what to say of a launch without a row.
        taken: whether the worker took its jobs, or said that it never will.
        seconds: how long the worker took for each of its phases.
    """

    title: str
    launches: Sequence[Note]
    rows: Sequence[LaunchRow]
    lack: Failed
    taken: bool = True
    seconds: Mapping[str, float]


class CountersRun:
    """Reads one set of metrics once. :meth:`start` and :meth:`tell` in any order, then :meth:`finish`.

    Args:
        way: how.
        names: field -> metric of the set.
        device: the GPU.

    Raises:
        OSError: no folder can be made.
    """

    def __init__(self, way: CounterWay, names: Mapping[str, str], device: DeviceInfo) -> None:
        self.way, self.names, self._device = way, dict(names), device
        # A profiler that had to be killed may still be writing.
        self._folder = tempfile.TemporaryDirectory(prefix="moetune-counters-", ignore_cleanup_errors=True)
        self._path = Path(self._folder.name)
        self._process: LeashedProcess | None = None

    def start(self, limit_s: float, wait_s: float = 0.0) -> None:
        """Start the worker, which waits up to ``wait_s`` for its jobs, and then has ``limit_s`` for them.

        Raises:
            OSError: it cannot be started.
        """
        arguments = [str(wait_s), str(self._path / JOBS), str(self._path / LAUNCHES)]
        command = self.way.command(list(self.names.values()), self._device, self._path, arguments)
        self._process = LeashedProcess(command, self._path, wait_s + limit_s + GRACE_S)

    def wake(self, device_index: int) -> None:
        """Let the worker start CUDA; it allocates little on the GPU before it has jobs. Raises OSError."""
        self._show(WAKE, {"device_index": device_index})

    def tell(self, request: Mapping[str, Any]) -> None:
        """Let the worker begin. Raises OSError: the jobs cannot be written."""
        self._show(JOBS, request)

    def finish(self, limit_s: float) -> Counted | Failed:
        """Wait for the end, up to ``limit_s``, and return what was noted and counted; it must have been started."""
        assert self._process is not None
        ended = self._process.finish(limit_s)
        if ended is None:
            reason = f"{self.way.title} did not finish within {limit_s:.0f} s and was stopped"
            return Failed(FailureKind.TIMEOUT, reason)
        path = self._path / LAUNCHES
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        notes: list[Note] = [note for line in lines if (note := _note(line)) is not None]
        return Counted(
            title=self.way.title,
            launches=[note for note in notes if "job" in note],
            rows=self.way.rows(notes, self._path),
            lack=self.way.explain(ended, notes, self._path),
            taken=path.exists(),
            seconds={name: value for note in notes for name, value in note.get("seconds", {}).items()},
        )

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


def _note(line: str) -> Note | None:
    """Return one note; None for what a worker that died left of its last one."""
    try:
        return json.loads(line)
    except ValueError:
        return None
