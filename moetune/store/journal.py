"""Which of SQLite's two journals a store uses.

The write-ahead log lets reports read while a sweep writes, but its index is memory that all its users map: on a network file
system the machines would each map their own, and SQLite cannot notice. So it is used where the file system is known to be of
one machine, and the rollback journal, which needs file locks alone, everywhere else.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import suppress
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
_ON_DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "fuseblk", "ntfs3"}
OF_ONE_MACHINE = frozenset({*_ON_DISKS, "exfat", "vfat", "tmpfs", "ramfs", "overlay", "fuse-overlayfs"})
UNKNOWN = "unknown"
PATIENCE_S = 2.0  # another process that starts holds the file for milliseconds while it makes the tables
_PAUSE_S = 0.02


def file_system(path: Path) -> str:
    """Return the type of the file system under ``path``, e.g. ``ext4`` or ``nfs4``; ``unknown`` where nobody says."""
    try:
        mounts = MOUNTS.read_text("utf-8", "surrogateescape")
        real = path.resolve()
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        return UNKNOWN
    best, found = -1, UNKNOWN
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.partition(" ")[0]
        if len(fields) < 5 or not kind:
            continue
        point = Path(_unescaped(fields[4]))
        # >=: of two mounts at one place the later one hides the earlier
        if real.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), kind
    return found


def suits_write_ahead_log(path: Path) -> bool:
    """Whether every process that opens the store at ``path`` runs on one machine."""
    return file_system(path) in OF_ONE_MACHINE


def use_best_journal(connection: sqlite3.Connection, path: Path) -> str:
    """Set the journal that suits the file system and return the one in use: ``wal`` or ``delete``.

    Where another process has the file open with the other journal, that one serves both. SQLite refuses a log that its own
    file layer cannot keep, and the rollback journal is as safe: each commit then waits for the disk.
    """
    wanted = "wal" if suits_write_ahead_log(path) else "delete"
    mode = _ask_for(connection, wanted)
    if mode == "wal" and not _works(connection):
        mode = _ask_for(connection, "delete")
    # A log of whole commits survives a power cut at NORMAL, less its last rows; a rollback journal needs FULL for that.
    connection.execute(f"PRAGMA synchronous={'NORMAL' if mode == 'wal' else 'FULL'}")
    return mode


def _ask_for(connection: sqlite3.Connection, mode: str) -> str:
    """Change the journal if that is possible now, and return what SQLite says is in use."""
    give_up = time.monotonic() + PATIENCE_S
    while True:
        with suppress(sqlite3.OperationalError):  # locked: this one statement waits for nobody
            return _answer(connection, f"PRAGMA journal_mode={mode}")
        used = _answer(connection, "PRAGMA journal_mode")
        if used == "wal" or time.monotonic() > give_up:  # a log stays as long as somebody has the file open
            return used
        time.sleep(_PAUSE_S)


def _answer(connection: sqlite3.Connection, statement: str) -> str:
    return str(connection.execute(statement).fetchone()[0])


def _works(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        return False
    return True


def _unescaped(field: str) -> str:
    """Return a mount point as it is called; the kernel writes blanks and backslashes as octal numbers."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
