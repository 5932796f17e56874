"""The trial store's SQLite file: opening it safely, its schema, and its errors as sentences."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from moetune.store.errors import StoreError

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 60.0  # another sweep's commit takes milliseconds; a stopped one holds no lock
STORE_VARIABLE = "MOETUNE_STORE"
_OTHER_SCHEMA = ("no such table", "no such column", "has no column", "columns but")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    id TEXT PRIMARY KEY,
    provenance TEXT NOT NULL,       -- what may be reused: equal text, equal meaning
    backend TEXT NOT NULL,
    shape_key TEXT NOT NULL,
    shape TEXT NOT NULL,            -- JSON
    device TEXT NOT NULL,           -- JSON
    kernels_sha256 TEXT NOT NULL,
    triton TEXT NOT NULL,
    torch TEXT NOT NULL,
    driver TEXT NOT NULL,
    ceilings TEXT,                  -- JSON, once measured
    command TEXT NOT NULL,
    started_at TEXT NOT NULL        -- ISO 8601, UTC
);
CREATE INDEX IF NOT EXISTS runs_by_provenance ON runs (provenance);
CREATE TABLE IF NOT EXISTS trials (
    id INTEGER PRIMARY KEY,         -- the order in which trials ended
    run TEXT NOT NULL REFERENCES runs (id),
    tokens INTEGER NOT NULL,        -- 0: ended at compile, for every token count
    subject TEXT NOT NULL,
    choice TEXT NOT NULL,           -- JSON of a config or plan, or a block_m
    stage TEXT NOT NULL,
    outcome TEXT NOT NULL,          -- JSON
    compiled TEXT,                  -- JSON
    verified INTEGER NOT NULL,
    ended_at TEXT NOT NULL          -- ISO 8601, UTC
);
CREATE INDEX IF NOT EXISTS trials_by_run ON trials (run, tokens);
CREATE TABLE IF NOT EXISTS bounds (
    run TEXT NOT NULL REFERENCES runs (id),
    tokens INTEGER NOT NULL,
    bound_us REAL NOT NULL,
    PRIMARY KEY (run, tokens)
);
"""


def default_store_path() -> Path:
    """Return ``MOETUNE_STORE``, else ``moetune/trials.sqlite`` in the user's XDG state directory."""
    named = os.environ.get(STORE_VARIABLE)
    if named:
        return Path(named).expanduser()
    state = os.environ.get("XDG_STATE_HOME")
    root = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
    return root / "moetune" / "trials.sqlite"


def connect(path: Path) -> sqlite3.Connection:
    """Open the store at ``path``, making it if it is not there.

    Raises:
        StoreError: the file is damaged, is no trial store, was written by a newer moetune, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot make the folder of the trial store {path}: {error.strerror or error}; "
            "name another store with --store, or where it goes beside the table another folder with --out"
        ) from None
    with sentences(path):
        # autocommit: every statement is its own transaction unless BEGIN says otherwise
        # absolute: a file called ":memory:" is a file
        connection = sqlite3.connect(path.absolute(), timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Open the store at ``path`` without changing a byte of it, also on a read-only disk.

    Raises:
        StoreError: there is none, it is damaged, is no trial store, or was written by a newer moetune.
    """
    # Nobody writes where no log lies beside: SQLite may then leave its index file away, which a read-only disk refuses.
    written = any(path.with_name(path.name + log).exists() for log in ("-wal", "-journal"))
    how = "mode=ro" if written else "immutable=1"
    with sentences(path):
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, timeout=BUSY_TIMEOUT_S)
        try:
            _refuse_without_tables(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection


def _refuse_without_tables(connection: sqlite3.Connection, path: Path) -> None:
    if _version(connection, path) == 0:
        raise _foreign(path)
    connection.execute("SELECT count(*) FROM runs").fetchone()


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    if _version(connection, path) == 0:
        _create(connection, path)
    _use_write_ahead_log(connection)
    connection.execute("PRAGMA synchronous=NORMAL")


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema's version, 0 for a file without one; refuse a newer one."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"the trial store {path} was written by a newer moetune (schema {version}, this one knows {SCHEMA_VERSION}); "
            "upgrade moetune, or name another store with --store"
        )
    if version < 0:
        raise _foreign(path)
    return version


def _foreign(path: Path) -> StoreError:
    return StoreError(f"{path} is no trial store of moetune; name another with --store")


def _create(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables, in one transaction: a second process that starts now waits and finds them."""
    connection.execute("BEGIN IMMEDIATE")
    foreign = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    fresh = connection.execute("PRAGMA user_version").fetchone()[0] == 0
    if foreign and fresh:
        connection.execute("ROLLBACK")
        raise _foreign(path)
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Prefer the write-ahead log; some network file systems refuse it, and the rollback journal is as safe."""
    try:
        connection.execute("PRAGMA journal_mode=WAL").fetchone()
        connection.execute("SELECT count(*) FROM runs").fetchone()
    except sqlite3.OperationalError:
        connection.execute("PRAGMA journal_mode=DELETE").fetchone()


@contextmanager
def sentences(path: Path) -> Generator[None]:
    """Turn SQLite's errors into one sentence with the fix."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if any(words in str(error) for words in _OTHER_SCHEMA):
            raise _foreign(path) from error
        raise StoreError(
            f"cannot use the trial store {path}: {error}; free the disk or fix its permissions, or name another with --store"
        ) from error
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"the trial store {path} is damaged ({error}); move it away (its trials are lost, tables are not), "
            "or name another with --store"
        ) from error
