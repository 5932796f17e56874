"""What a trial store tells of the last sweep that wrote to it: how much it tried, and when it measured."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from moetune.errors import RunError
from moetune.outcome import EVERY_COUNT, Measured, Source, Stage, Subject, Trial
from moetune.store import ListedTrial, RunRow, Store, StoreError, TrialFilter
from moetune.store.database import connect_to_read

GEMMS = (Subject.GATE_UP, Subject.DOWN)
_TRIED = (
    "SELECT count(*) FROM (SELECT DISTINCT subject, choice FROM trials "
    "WHERE tokens != 0 AND subject IN ('gate_up', 'down'))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSweep:
    """One run as the store has it.

    Args:
        run: what its trials depend on.
        trials: rows that it wrote.
        configs: different GEMM configs that it launched.
        window: seconds since the epoch, UTC, of the first and the last trial that was measured; None where there is none.
            Failures of the compiler are left out, and so are the winners that are written again once they were counted.
    """

    run: RunRow
    trials: int
    configs: int
    window: tuple[float, float] | None


def last_sweep(path: Path) -> StoredSweep:
    """Return the last run of the store at ``path``.

    Raises:
        StoreError: the file cannot be read.
        RunError: no run began.
    """
    with Store.to_read(path) as store:
        runs = store.runs()
        if not runs:
            raise RunError(f"no sweep began in the store {path}")
        return stored_sweep(runs[-1], [one for one in store.newest(TrialFilter()) if one.run.run == runs[-1].run])


def stored_sweep(run: RunRow, listed: Sequence[ListedTrial]) -> StoredSweep:
    """Return what the trials of a run, in any order, say of it."""
    launched = [one for one in listed if one.trial.tokens != EVERY_COUNT]
    times_s = [seconds(one.ended_at) for one in launched if not was_counted(one.trial)]
    return StoredSweep(
        run=run,
        trials=len(listed),
        configs=len({(one.trial.subject, one.trial.choice) for one in launched if one.trial.subject in GEMMS}),
        window=(min(times_s), max(times_s)) if times_s else None,
    )


def was_counted(trial: Trial) -> bool:
    """Whether this is a final that was written down again with what hardware counters gave.

    Counters come after all measuring, so only such finals carry a figure from that source.
    """
    outcome = trial.outcome
    if trial.stage is not Stage.FINAL or not isinstance(outcome, Measured):
        return False
    figures = (outcome.flops_per_byte, outcome.bandwidth_gbps, outcome.issue_efficiency)
    return any(figure.source is Source.COUNTER for figure in figures)


def seconds(stamp: str) -> float:
    """Return a time stamp of the store as seconds since the epoch.

    >>> seconds("1970-01-01T00:01:00.500+00:00")
    60.5
    """
    return datetime.fromisoformat(stamp).timestamp()


def tried(path: Path) -> int:
    """Return how many different GEMM configs were launched so far; a store that is only just being made has none."""
    try:
        with closing(connect_to_read(path)) as connection:
            return int(connection.execute(_TRIED).fetchone()[0])
    except (StoreError, sqlite3.Error):  # the sweep writes it at this very moment: the next look tells
        return 0
