"""Run a command on a leash: it ends, with all that it started, as soon as its owner does, however that ends.

Started as ``python -P -m moetune.measure.leash LIMIT_S FOLDER COMMAND…``. Standard input is a pipe that only the owner
holds the other end of: it closes when the owner lets go, and also when the owner is killed. What is left of the command
is then killed, in whichever process group or session it lives, and FOLDER, which an owner that was killed cannot remove,
is removed. The same happens after LIMIT_S seconds. Exits as the command did, by a shell's numbers.

A process in between can do what PR_SET_PDEATHSIG cannot: that reaches only the direct child, and a profiler puts
processes of its own between us and the program that it runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

PULLED = 124  # the exit code where the command did not end by itself, as that of timeout(1)
_PR_SET_CHILD_SUBREAPER = 36
_OWNER = 0  # the file descriptor of the pipe from the owner
_PAUSE_S = 0.005


def main() -> None:
    """Run one command."""
    limit_s, folder, command = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    # Whoever loses its parent below us becomes our child, so that none gets away.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    deadline, woken = time.monotonic() + limit_s, _woken_by_signals()
    code = _wait(_started(command), woken, deadline)
    _kill_the_rest()
    if code is None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(PULLED if code is None else code if code >= 0 else 128 - code)


def _woken_by_signals() -> int:
    """Return a file descriptor that carries a byte for each child that ended and each request to end, its number."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # ignored, they would wake nobody
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    return readable


def _started(command: list[str]) -> int:
    """Start the command without an input of its own and return its process id."""
    no_input = (os.POSIX_SPAWN_OPEN, _OWNER, os.devnull, os.O_RDONLY, 0)
    try:
        return os.posix_spawn(
            command[0], command, os.environ, file_actions=[no_input], setsigdef=[signal.SIGPIPE, signal.SIGXFSZ]
        )
    except OSError as error:
        sys.exit(f"{command[0]} could not be started: {error.strerror}")


def _wait(child: int, woken: int, deadline: float) -> int | None:
    """Return the child's exit code; None when the owner is gone or the time is up."""
    poll = select.poll()
    poll.register(_OWNER, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for pid, code in _ended():
            if pid == child:
                return code
        left_s = deadline - time.monotonic()
        ready = dict(poll.poll(1000 * max(left_s, 0.0)))
        asked_to_end = woken in ready and signal.SIGTERM in os.read(woken, 4096)
        if _OWNER in ready or asked_to_end or left_s <= 0:
            return None


def _ended() -> list[tuple[int, int]]:
    """Return the children that have ended, those that we inherited among them, and their exit codes."""
    ended: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((found[0], os.waitstatus_to_exitcode(found[1])))
    return ended


def _kill_the_rest() -> None:
    """Kill generation after generation: the children of whom we kill are ours next."""
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            for pid in _children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_PAUSE_S)


def _children() -> list[int]:
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            after_name = (folder / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            if int(after_name[1]) == os.getpid():
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    main()
