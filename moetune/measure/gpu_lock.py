"""One sweep at a time on one GPU: a lock file per GPU, which the kernel releases when its holder dies.

The file stays for ever and says who held it last; only the lock on it counts.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, cast

from moetune.measure.gpu_name import Gpu

PAUSE_S = 0.2
MAX_HOLDER_BYTES = 4096
MAX_COMMAND_CHARACTERS = 120
Held = int  # the file's descriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who has a GPU: process, machine, since when (ISO 8601, UTC), and the command it runs."""

    pid: int
    host: str
    since: str
    command: str

    @classmethod
    def of_this_process(cls) -> Self:
        """Return what this process writes into the lock file."""
        command = os.fsencode(shlex.join(["moetune", *sys.argv[1:]])).decode("utf-8", "backslashreplace")
        since = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(pid=os.getpid(), host=socket.gethostname(), since=since, command=command[:MAX_COMMAND_CHARACTERS])

    @classmethod
    def parse(cls, text: bytes) -> Self | None:
        """Return the holder that a lock file names, None where it names none."""
        with suppress(ValueError, TypeError, RecursionError):
            value: Any = json.loads(text)
            texts = ("host", "since", "command")
            if type(value["pid"]) is int and all(type(value[name]) is str for name in texts):
                known = cast("dict[str, Any]", value)
                return cls(pid=known["pid"], **{name: known[name][:MAX_COMMAND_CHARACTERS] for name in texts})
        return None

    def __str__(self) -> str:
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        since = self.since.replace("T", " ").replace("+00:00", " UTC")
        return f"process {self.pid}{where}, since {since}: {self.command}"


@contextmanager
def locked(
    gpu: Gpu, folders: Iterable[Path], on_wait: Callable[[str], None], on_unlockable: Callable[[str], None]
) -> Generator[float]:
    """Hold the lock of ``gpu`` for the block; yield the seconds that it was waited for.

    Args:
        gpu: which one.
        folders: where lock files may lie; the first that can be used is, so all sweeps must name the same.
        on_wait: told who holds the GPU when waiting begins, and again when somebody else was quicker.
        on_unlockable: told why no folder could be used; the block then runs without a lock.
    """
    held, reasons = _open_first(gpu, folders)
    if held is None:
        on_unlockable("; ".join(reasons))
        yield 0.0
        return
    try:
        started_s = time.monotonic()
        waited = _wait(held, on_wait)
        _sign(held)
        yield time.monotonic() - started_s if waited else 0.0
    finally:
        os.close(held)  # no unlink: another process may be waiting for this very file


@contextmanager
def locked_if_free(gpu: Gpu, folders: Iterable[Path], on_unlockable: Callable[[str], None]) -> Generator[str | None]:
    """Hold the lock of ``gpu`` for the block where nobody has it, and yield None; else yield who has it, at once.

    Args:
        gpu: which one.
        folders: where lock files may lie, as for :func:`locked`.
        on_unlockable: told why no folder could be used; the block then runs without a lock.
    """
    held, reasons = _open_first(gpu, folders)
    if held is None:
        on_unlockable("; ".join(reasons))
        yield None
        return
    try:
        if not _try(held):
            yield _holder_of(held)
            return
        _sign(held)
        yield None
    finally:
        os.close(held)


def _open_first(gpu: Gpu, folders: Iterable[Path]) -> tuple[Held | None, list[str]]:
    reasons: list[str] = []
    for folder in folders:
        try:
            return _open(folder, f"gpu-{gpu.key}.lock"), reasons
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror or error}")
    return None, reasons


def _open(folder: Path, name: str) -> Held:
    """Open a lock file in a folder of this user's alone, and see that files there can be locked."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise PermissionError(None, "the folder belongs to somebody else")
    held = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if _try(held):
            fcntl.flock(held, fcntl.LOCK_UN)
    except BaseException:
        os.close(held)
        raise
    return held


def _try(held: Held) -> bool:
    """Take the lock if it is free; raises OSError where the file system has no locks."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(held: Held, on_wait: Callable[[str], None]) -> bool:
    """Take the lock; False where it was free. Asks again and again rather than sleep in the kernel: holders change."""
    if _try(held):
        return False
    said: str | None = None
    while True:
        time.sleep(PAUSE_S)  # before anything is said: whoever took it just now still has to sign
        if _try(held):
            return True
        text = _holder_of(held)
        if text != said:
            said = text
            on_wait(text)


def _holder_of(held: Held) -> str:
    holder = Holder.parse(os.pread(held, MAX_HOLDER_BYTES, 0))
    return "another process" if holder is None else str(holder)


def _sign(held: Held) -> None:
    """Say in the file who holds it; a full disk is no reason not to sweep."""
    with suppress(OSError):
        os.ftruncate(held, 0)
        os.pwrite(held, json.dumps(asdict(Holder.of_this_process())).encode(), 0)
