"""Files that appear whole or not at all, and leave nothing behind: tables, recordings and exports are written so."""

from __future__ import annotations

import fcntl
import glob
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

MODE = 0o644  # a temporary file is private when it is made; a table is for every process of the machine


@contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """Yield a file to write into; it takes the place of ``path`` in one step when the block ends without an error.

    What killed writers of ``path`` left beside it is removed on the way: each writer holds a lock on its unfinished file,
    which ends with its process.

    Raises:
        OSError: the folder or the file cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(path)
    file, unfinished = _begin(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            unfinished.chmod(MODE)
            unfinished.replace(path)  # before it closes, which ends the lock
    except BaseException:  # also Ctrl-C: a half-written file must not stay
        with suppress(OSError):
            unfinished.unlink()
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``, all or nothing; raises OSError as :func:`whole_file` does."""
    with whole_file(path) as file:
        file.write(content)


def _begin(path: Path) -> tuple[BinaryIO, Path]:
    """Make and lock an unfinished file; again, if another writer took it for a dead one's before it was locked."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=_prefix(path), suffix=".tmp", dir=path.parent)
        with suppress(OSError):  # a file system without locks: nobody can lock it to remove it either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return os.fdopen(descriptor, "wb"), Path(name)
        os.close(descriptor)


def _remove_unfinished(path: Path) -> None:
    for left in path.parent.glob(f"{glob.escape(_prefix(path))}*.tmp"):
        with suppress(OSError), left.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer lives: BlockingIOError
            left.unlink()


def _prefix(path: Path) -> str:
    return f".{path.name}."
