"""The trial store: every trial as one committed row the moment it ends."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from moetune.outcome import Failed, FailureKind, Stage, Trial
from moetune.store.codec import choice_text, compiled_text, dump, load, outcome_to_json, trial_from_json
from moetune.store.database import connect, connect_to_read, sentences
from moetune.store.errors import StoreError
from moetune.store.provenance import Provenance
from moetune.store.rows import ListedTrial, RunRow, TrialFilter, TrialKey, TrialRow
from moetune_kernels import __version__
from moetune_kernels.device import DeviceInfo
from moetune_kernels.errors import MoetuneError
from moetune_kernels.shape import MoEShape

_WITH_BOUNDS = (
    "SELECT trials.*, bounds.bound_us FROM trials JOIN runs ON runs.id = trials.run "
    "LEFT JOIN bounds ON bounds.run = trials.run AND bounds.tokens = trials.tokens"
)
_EARLIER_REPLAYS = "SELECT id FROM runs WHERE provenance = ? AND backend = 'replay'"
_RUN_TEXTS = ("provenance", "backend", "kernels_sha256", "triton", "torch", "driver", "command", "started_at")
_LATER_TEXTS = ("moetune", "gpu", "ended_at")


class Store:
    """SQLite trials at one path. Two sweeps may share a file: each statement waits for the other's commit.

    Args:
        path: the file; made with its folder if it is not there.
        connection: to the file, where it was opened in a way of its own.

    Raises:
        StoreError: the file cannot be used; the message says how to go on.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection | None = None) -> None:
        self.path = path
        self._connection = connect(path) if connection is None else connection

    @classmethod
    def to_read(cls, path: Path) -> Self:
        """Open a store that is there and stays as it is: for reports, and for stores of somebody else.

        Raises:
            StoreError: as for a store that is written.
        """
        return cls(path, connect_to_read(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; every row was committed as it was written."""
        self._connection.close()

    def begin(self, provenance: Provenance, command: str, gpu: str | None = None) -> Run:
        """Start a run whose trials are written under a new id; ``gpu`` is the UUID of the GPU that answers."""
        run = uuid.uuid4().hex
        self._execute(
            "INSERT INTO runs (id, provenance, backend, shape_key, shape, device, kernels_sha256, triton, torch, driver, "
            "command, started_at, moetune, gpu) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            run,
            provenance.key,
            provenance.backend,
            provenance.shape.key,
            dump(provenance.shape.to_json()),
            dump(provenance.device.to_json()),
            provenance.kernels_sha256,
            provenance.triton,
            provenance.torch,
            provenance.driver,
            command,
            _now(),
            __version__,
            gpu,
        )
        return Run(run, self._execute)

    def begin_replay(self, provenance: Provenance, command: str) -> Run:
        """Start a replay in the place of earlier ones of the same recording, in one step; what was measured stays.

        It would write the same again, and rows of replays are worth nothing twice. An earlier replay that still runs loses
        its rows as a whole and writes no more: the store holds the trials of the last one that began.
        """
        with self._transaction():
            for table in ("trials", "bounds"):
                self._execute(f"DELETE FROM {table} WHERE run IN ({_EARLIER_REPLAYS})", provenance.key)  # noqa: S608
            self._execute(f"DELETE FROM runs WHERE id IN ({_EARLIER_REPLAYS})", provenance.key)  # noqa: S608
            return self.begin(provenance, command)

    @contextmanager
    def _transaction(self) -> Generator[None]:
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite ends a transaction by itself when the disk is full
                self._connection.execute("ROLLBACK")
            raise

    def known(self, provenance: Provenance) -> dict[TrialKey, Trial]:
        """Return what runs of equal provenance leave to be spared: the latest screening of every choice.

        Finals are timed again by every run, except a plan that faulted or hung in its last one: it would again.
        """
        latest_of_each = self.trials(provenance)
        return {
            (trial.subject, trial.tokens, trial.choice): trial
            for trial in latest_of_each
            if trial.stage is Stage.SCREEN or _took_the_device_down(trial)
        }

    def rows(self, shape: MoEShape, device: DeviceInfo | None = None, backend: str = "cuda") -> list[TrialRow]:
        """Return all trials of a shape, on one device or on any, in the order in which they ended."""
        query = (
            "SELECT trials.*, runs.provenance, runs.backend, runs.shape, runs.device, runs.kernels_sha256, runs.triton, "
            "runs.torch, runs.driver FROM trials JOIN runs ON runs.id = trials.run "
            "WHERE runs.shape_key = ? AND runs.backend = ? AND (? IS NULL OR runs.device = ?) ORDER BY trials.id"
        )
        named = None if device is None else dump(device.to_json())
        with sentences(self.path):
            return [self._trial_row(row) for row in self._query(query, shape.key, backend, named, named)]

    def runs(self) -> list[RunRow]:
        """Return every run, the oldest first: which shapes and devices the store knows."""
        with sentences(self.path):
            return [self._run_row(row) for row in self._query("SELECT * FROM runs ORDER BY started_at, rowid")]

    def newest(self, wanted: TrialFilter) -> Iterator[ListedTrial]:
        """Yield the trials that ``wanted`` admits with their runs, the latest first, reading no further than is asked."""
        where, values = wanted.condition()
        query = f"{_WITH_BOUNDS} WHERE {where} ORDER BY trials.id DESC"
        with sentences(self.path):
            runs: dict[str, RunRow] = {}
            for row in self._query(query, *values):
                if row["run"] not in runs:
                    runs[row["run"]] = self._run_row(
                        self._query("SELECT * FROM runs WHERE id = ?", row["run"]).fetchone()
                    )
                yield ListedTrial(
                    number=row["id"],
                    run=runs[row["run"]],
                    trial=self._trial(row),
                    ended_at=row["ended_at"],
                    bound_us=row["bound_us"],
                )

    def count(self, wanted: TrialFilter) -> int:
        """Return how many trials ``wanted`` admits."""
        where, values = wanted.condition()
        query = f"SELECT count(*) AS trials FROM trials JOIN runs ON runs.id = trials.run WHERE {where}"  # noqa: S608
        with sentences(self.path):
            return self._query(query, *values).fetchone()["trials"]

    def trials_of_runs(self) -> dict[str, tuple[int, int]]:
        """Return how many trials each run has, and how many of them have no time."""
        failed = "sum(substr(outcome, 1, 8) = '{\"kind\":')"
        with sentences(self.path):
            found = self._query(f"SELECT run, count(*) AS ended, {failed} AS failed FROM trials GROUP BY run")  # noqa: S608
            return {row["run"]: (row["ended"], row["failed"]) for row in found}

    def bounds(self, provenance: Provenance) -> dict[int, float]:
        """Return the latest physical bound in microseconds per token count, of runs of equal provenance.

        The bound counts the experts that the rows touched, so it is another under another routing.
        """
        query = (
            "SELECT bounds.tokens, bounds.bound_us FROM bounds JOIN runs ON runs.id = bounds.run "
            "WHERE runs.provenance = ? ORDER BY runs.started_at, runs.rowid"
        )
        with sentences(self.path):
            found = self._query(query, provenance.key)
            return {row["tokens"]: row["bound_us"] for row in found}

    def trials(self, provenance: Provenance) -> list[Trial]:
        """Return the latest trial of every subject, token count, choice and stage by runs of equal provenance."""
        query = (
            "SELECT trials.* FROM trials JOIN runs ON runs.id = trials.run WHERE runs.provenance = ? ORDER BY trials.id"
        )
        found: dict[tuple[TrialKey, Stage], Trial] = {}
        with sentences(self.path):
            for row in self._query(query, provenance.key):
                trial = self._trial(row)
                found[(trial.subject, trial.tokens, trial.choice), trial.stage] = trial
        return list(found.values())

    def _query(self, query: str, *values: object) -> sqlite3.Cursor:
        cursor = self._connection.execute(query, values)
        cursor.row_factory = sqlite3.Row
        return cursor

    def _execute(self, statement: str, *values: object) -> None:
        with sentences(self.path):
            self._connection.execute(statement, values)

    def _trial(self, row: sqlite3.Row) -> Trial:
        value: dict[str, Any] = {name: row[name] for name in ("subject", "tokens", "stage")}
        try:
            value |= {"choice": load(row["choice"]), "outcome": load(row["outcome"])}
            value["compiled"] = None if row["compiled"] is None else load(row["compiled"])
            return trial_from_json(value | {"verified": bool(row["verified"])})
        except (ValueError, TypeError, MoetuneError) as error:
            raise self._damaged(f"trial {row['id']}: {error}") from error

    def _trial_row(self, row: sqlite3.Row) -> TrialRow:
        shape, device = self._subjects(row)
        texts = {
            name: row[name] for name in ("run", "backend", "kernels_sha256", "triton", "torch", "driver", "ended_at")
        }
        return TrialRow(shape=shape, device=device, routing=self._routing(row), trial=self._trial(row), **texts)

    def _run_row(self, row: sqlite3.Row) -> RunRow:
        shape, device = self._subjects(row)
        ceilings = None if row["ceilings"] is None else load(row["ceilings"])
        there = set(row.keys())  # a store of an earlier version is read as it is
        return RunRow(
            run=row["id"],
            shape=shape,
            device=device,
            ceilings=ceilings,
            routing=self._routing(row),
            **{name: row[name] for name in _RUN_TEXTS},
            **{name: row[name] for name in _LATER_TEXTS if name in there},
        )

    def _subjects(self, row: sqlite3.Row) -> tuple[MoEShape, DeviceInfo]:
        try:
            return MoEShape.from_json(load(row["shape"])), DeviceInfo.from_json(load(row["device"]))
        except (ValueError, TypeError, MoetuneError) as error:
            raise self._damaged(str(error)) from error

    def _routing(self, row: sqlite3.Row) -> str:
        try:
            return Provenance.from_json(load(row["provenance"])).routing
        except (ValueError, TypeError, MoetuneError) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, what: str) -> StoreError:
        return StoreError(
            f"the trial store {self.path} holds a row that cannot be read ({what}); move the file away, "
            "or name another with --store"
        )


class Run:
    """The writing end of one sweep. A replay that a later one took the place of has no run any more and writes nothing."""

    def __init__(self, run: str, execute: Callable[..., None]) -> None:
        self.id = run
        self._execute = execute

    def record(self, trial: Trial) -> None:
        """Commit one trial."""
        self._execute(
            "INSERT INTO trials (run, tokens, subject, choice, stage, outcome, compiled, verified, ended_at) "
            "SELECT id, ?, ?, ?, ?, ?, ?, ?, ? FROM runs WHERE id = ?",
            trial.tokens,
            trial.subject.value,
            choice_text(trial.choice),
            trial.stage.value,
            dump(outcome_to_json(trial.outcome)),
            None if trial.compiled is None else compiled_text(trial.compiled),
            int(trial.verified),
            _now(),
            self.id,
        )

    def record_bound(self, tokens: int, bound_us: float) -> None:
        """Commit the physical bound of one token count."""
        self._execute(
            "INSERT OR REPLACE INTO bounds (run, tokens, bound_us) SELECT id, ?, ? FROM runs WHERE id = ?",
            tokens,
            bound_us,
            self.id,
        )

    def end(self) -> None:
        """Commit that the run came to its end: it was not stopped, and did not fail."""
        self._execute("UPDATE runs SET ended_at = ? WHERE id = ?", _now(), self.id)

    def record_ceilings(self, bytes_per_s: float, flops: float) -> None:
        """Commit what the device reached in this run."""
        ceilings = dump({"bytes_per_s": bytes_per_s, "flops": flops})
        self._execute("UPDATE runs SET ceilings = ? WHERE id = ?", ceilings, self.id)


def _took_the_device_down(trial: Trial) -> bool:
    return isinstance(trial.outcome, Failed) and trial.outcome.kind in (FailureKind.LAUNCH, FailureKind.TIMEOUT)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def latest(rows: list[TrialRow]) -> list[TrialRow]:
    """Return the last row of every (subject, tokens, choice, stage): what counts after a race's heats and reruns."""
    found: dict[tuple[TrialKey, Stage], TrialRow] = {}
    for row in rows:
        trial = row.trial
        found[(trial.subject, trial.tokens, trial.choice), trial.stage] = row
    return list(found.values())
