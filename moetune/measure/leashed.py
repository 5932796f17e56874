"""A program that works for us beside this process, and ends with it, however that ends, and all of it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import moetune_kernels

LEASH = "moetune.measure.leash"
_END_S = 5.0  # from a closed pipe to the end of all processes


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended, and what it and all that it started printed."""

    printed: str
    exit_code: int


class LeashedProcess:
    """A program on a leash (:mod:`moetune.measure.leash`), started.

    Args:
        command: the program and its arguments; it finds our packages whatever its folder is.
        folder: a folder for what it prints; removed with the processes when this one is killed.
        limit_s: seconds from now after which all of it is killed, whatever it does.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, command: Sequence[str], folder: Path, limit_s: float) -> None:
        self._printed = folder / "printed.txt"
        with self._printed.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", LEASH, str(limit_s), str(folder), *command],
                stdin=subprocess.PIPE,  # nothing is ever written: that it is open tells that we live
                stdout=sink,
                stderr=sink,
                env=_environment(),
                start_new_session=True,
            )

    def finish(self, limit_s: float) -> Ended | None:
        """Wait until the program has ended, and end what is left of it; at the time limit all of it, and return None."""
        try:
            code = self._process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.end()  # also on Ctrl-C
        return Ended(printed=text_of(self._printed), exit_code=code)

    def end(self) -> None:
        """End all of it, at once; safe to call twice."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # the driver does not let go of one of them
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def python(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs one of our modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


def text_of(path: Path) -> str:
    """Return what a file holds; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def last_line(printed: str) -> str:
    """Return the last line with something in it."""
    return next((line.strip() for line in reversed(printed.splitlines()) if line.strip()), "")


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    roots = [Path(__file__).resolve().parents[2], Path(str(moetune_kernels.__file__)).resolve().parents[1]]
    inherited = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, roots), *inherited])
    # Otherwise ncu copies its section files into the user's Documents.
    environment["NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT"] = "1"
    return environment
