"""Where ``moetune trials`` reads: a trial store or a recording, through the same few questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from moetune.outcome import Failed
from moetune.store import (
    ListedTrial,
    RunRow,
    Store,
    TrialFilter,
    load_recording,
    newest_recorded,
    recorded_run,
)

COMPRESSED = (".xz", ".gz")  # how recordings end; anything else is a trial store


class Source(Protocol):
    """Trials with their runs, from one file."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    def newest(self, wanted: TrialFilter) -> Iterator[ListedTrial]:
        """Yield the wanted trials, the latest first."""
        ...

    def count(self, wanted: TrialFilter) -> int:
        """Return how many trials are wanted."""
        ...

    def runs(self) -> list[RunRow]:
        """Return every run, the oldest first."""
        ...

    def trials_of_runs(self) -> Mapping[str, tuple[int, int]]:
        """Return how many trials each run has, and how many of them have no time."""
        ...


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open a store or a recording, by its ending.

    Raises:
        StoreError, RecordingError: it cannot be read.
    """
    if path.suffix in COMPRESSED:
        yield _Recorded(path)
        return
    with Store.to_read(path) as store:
        yield store


class _Recorded:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._recording = load_recording(path)
        self._run = recorded_run(self._recording, path.name)

    def newest(self, wanted: TrialFilter) -> Iterator[ListedTrial]:
        return iter(newest_recorded(self._recording, self._run, wanted))

    def count(self, wanted: TrialFilter) -> int:
        return len(newest_recorded(self._recording, self._run, wanted))

    def runs(self) -> list[RunRow]:
        return [self._run]

    def trials_of_runs(self) -> Mapping[str, tuple[int, int]]:
        failed = sum(isinstance(trial.outcome, Failed) for trial in self._recording.trials)
        return {self._run.run: (len(self._recording.trials), failed)}
