"""Files that appear whole or not at all, and never in place of somebody else's."""

from __future__ import annotations

import os
from pathlib import Path

from moetune.errors import RunError, UsageError
from moetune.reporting.theme import PNG_MARK

_HEAD_BYTES = 2048  # our mark stands in the first lines of a page, and in a picture's first chunks


def publish(path: Path, content: bytes) -> Path:
    """Write ``content``, replacing only a file that an earlier report wrote.

    Raises:
        UsageError: the place is taken by something else.
        RunError: the file cannot be written.
    """
    _refuse_foreign(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; name a folder that can be written with --out"
        ) from error
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return path


def _refuse_foreign(path: Path) -> None:
    if not os.path.lexists(path):
        return
    try:
        with path.open("rb") as file:
            ours = PNG_MARK.encode() in file.read(_HEAD_BYTES)
    except OSError:
        ours = False
    if not ours:
        raise UsageError(f"{path} was not written by `moetune report`; move it away or name another folder with --out")
