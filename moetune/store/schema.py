"""The tables of a trial store, and how a store of an earlier version becomes one of this version.

``PRAGMA user_version`` holds the version. A newer one is refused, an older one is brought up to date when it is opened to be
written, in one transaction, and read as it is when it is opened to be read. Nothing is ever dropped.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path

from moetune.store.errors import StoreError

SCHEMA_VERSION = 2

# Version 1, as it was released: later versions are made from it, so that a fresh store and a migrated one are the same.
_FIRST = (
    """CREATE TABLE runs (
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
)""",
    "CREATE INDEX runs_by_provenance ON runs (provenance)",
    """CREATE TABLE trials (
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
)""",
    "CREATE INDEX trials_by_run ON trials (run, tokens)",
    """CREATE TABLE bounds (
    run TEXT NOT NULL REFERENCES runs (id),
    tokens INTEGER NOT NULL,
    bound_us REAL NOT NULL,
    PRIMARY KEY (run, tokens)
)""",
)
# From the version that is the key to the next one: statements only add.
_STEPS = {
    1: (
        "ALTER TABLE runs ADD COLUMN moetune TEXT",  # moetune's own version
        "ALTER TABLE runs ADD COLUMN gpu TEXT",  # the GPU's UUID: which of several equal ones
        "ALTER TABLE runs ADD COLUMN ended_at TEXT",  # ISO 8601, UTC; NULL while it runs, and after it was stopped
    ),
}
_COLUMNS = {
    "runs": "id provenance backend shape_key shape device kernels_sha256 triton torch driver ceilings command started_at",
    "trials": "id run tokens subject choice stage outcome compiled verified ended_at",
    "bounds": "run tokens bound_us",
}


def version_of(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema's version, 0 for a file that is still empty.

    Raises:
        StoreError: a newer moetune wrote it, or something else did.
    """
    filled = _has_tables(connection)  # first: tables and version appear together, in another process perhaps just now
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"the trial store {path} was written by a newer moetune (schema {version}, this one knows {SCHEMA_VERSION}); "
            "upgrade moetune, or name another store with --store"
        )
    if version < 0 or (version == 0 and filled) or (version > 0 and not _is_ours(connection)):
        raise foreign(path)
    return version


def bring_up_to_date(connection: sqlite3.Connection, path: Path) -> None:
    """Make what a new file lacks, or what a store of an earlier version does: all of it, or nothing when it is cut short.

    A second process that starts now waits for the first and finds the work done.

    Raises:
        StoreError: as for :func:`version_of`; the file is left as it was.
    """
    if version_of(connection, path) == SCHEMA_VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = version_of(connection, path)
        if version == 0:
            create(connection)
        while 0 < version < SCHEMA_VERSION:
            _run(connection, _STEPS[version])
            version += 1
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # SQLite ends a transaction by itself when the disk is full
            connection.execute("ROLLBACK")
        raise


def create(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty database; the caller wraps it in a transaction and sets the version."""
    _run(connection, _FIRST)
    for version in sorted(_STEPS):
        _run(connection, _STEPS[version])


def foreign(path: Path) -> StoreError:
    """Return the error for a file that something else wrote."""
    return StoreError(f"{path} is no trial store of moetune; name another with --store")


def _run(connection: sqlite3.Connection, statements: tuple[str, ...]) -> None:
    for statement in statements:
        connection.execute(statement)


def _has_tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0


def _is_ours(connection: sqlite3.Connection) -> bool:
    """Whether the tables have the columns of version 1, which every version has."""
    for table, columns in _COLUMNS.items():
        found = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        if not set(columns.split()) <= found:
            return False
    return True
