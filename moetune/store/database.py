"""The trial store's SQLite file: where it lies, opening it safely, and its errors as sentences."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path

from moetune.store.errors import StoreError
from moetune.store.journal import suits_write_ahead_log, use_best_journal
from moetune.store.schema import bring_up_to_date, create, foreign, version_of

BUSY_TIMEOUT_S = 60.0  # another sweep's commit takes milliseconds; a stopped one holds no lock
STORE_VARIABLE = "MOETUNE_STORE"
_OTHER_SCHEMA = ("no such table", "no such column", "has no column", "columns but")
_WAITING_ROLLBACK = "SQLITE_READONLY_ROLLBACK"


def state_dir() -> Path:
    """Return moetune's folder in the user's XDG state directory; raises RuntimeError for a user without a home folder."""
    state = os.environ.get("XDG_STATE_HOME")
    root = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
    return root / "moetune"


def lock_dirs() -> tuple[Path, ...]:
    """Return the folders for lock files, first choice first: the user's state folder, then one of theirs for temporary files.

    A home that is read-only, or a file system that locks nothing, leaves the second.
    """
    temporary = Path(tempfile.gettempdir()) / f"moetune-{os.geteuid()}"
    try:
        return (state_dir() / "locks", temporary)
    except RuntimeError:  # a container whose user has no passwd entry
        return (temporary,)


def default_store_path() -> Path:
    """Return ``MOETUNE_STORE``, else ``moetune/trials.sqlite`` in the user's XDG state directory."""
    named = os.environ.get(STORE_VARIABLE)
    return Path(named).expanduser() if named else state_dir() / "trials.sqlite"


def connect(path: Path) -> sqlite3.Connection:
    """Open the store at ``path``, making it if it is not there, and bring it up to date.

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

    def prepare(connection: sqlite3.Connection) -> None:
        bring_up_to_date(connection, path)
        use_best_journal(connection, path)

    with sentences(path):
        # autocommit: every statement is its own transaction unless BEGIN says otherwise
        # absolute: a file called ":memory:" is a file; other threads: those of a sweep on several GPUs take turns
        file = path.absolute()
        connection = sqlite3.connect(file, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        return _prepared(connection, prepare)


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Open the store at ``path`` without changing a byte of it, also on a read-only disk.

    Only what a killed sweep left half-written in a rollback journal is undone first, as SQLite asks for. An empty file, which
    a sweep leaves that was killed as it started, is an empty store.

    Raises:
        StoreError: there is none, it is damaged, is no trial store, or was written by a newer moetune.
    """
    # A log's index is a file too, which a read-only disk refuses. Where no log lies beside nobody writes, and SQLite may be
    # told so; with a rollback journal it must look at each read, because that journal comes and goes.
    idle = suits_write_ahead_log(path) and not _has_journal(path)
    with sentences(path):
        try:
            return _open_to_read(path, "immutable=1" if idle else "mode=ro")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname == _WAITING_ROLLBACK:
                _roll_back(path)
                return _open_to_read(path, "mode=ro")
            if _has_journal(path) or not path.is_file():
                raise
            return _open_to_read(path, "immutable=1")


def _open_to_read(path: Path, how: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, timeout=BUSY_TIMEOUT_S)
    version = 0

    def prepare(opened: sqlite3.Connection) -> None:
        nonlocal version
        version = version_of(opened, path)
        opened.execute("SELECT count(*) FROM sqlite_master").fetchone()

    _prepared(connection, prepare)
    if version:
        return connection
    connection.close()
    return _empty()


def _empty() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    create(connection)
    connection.execute("PRAGMA query_only=ON")
    return connection


def _prepared(connection: sqlite3.Connection, prepare: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
    try:
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _has_journal(path: Path) -> bool:
    return any(path.with_name(path.name + log).exists() for log in ("-wal", "-journal"))


def _roll_back(path: Path) -> None:
    with closing(sqlite3.connect(path.absolute(), timeout=BUSY_TIMEOUT_S)) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()


@contextmanager
def sentences(path: Path) -> Generator[None]:
    """Turn SQLite's errors into one sentence with the fix."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if any(words in str(error) for words in _OTHER_SCHEMA):
            raise foreign(path) from error
        raise StoreError(
            f"cannot use the trial store {path}: {error}; free the disk or fix its permissions, or name another with --store"
        ) from error
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"the trial store {path} is damaged ({error}); move it away (its trials are lost, tables are not), "
            "or name another with --store"
        ) from error
