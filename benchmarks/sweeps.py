"""Runs `moetune sweep` as a user would, in a process of its own, timed from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from moetune.errors import RunError
from moetune_kernels.table import TunedTable
from moetune_kernels.table_file import read_table

DEFAULT_LAYER = "default"  # the name that stands for a sweep without --model
MOETUNE = (sys.executable, "-m", "moetune")
KILLED = -9
GRACE_S = 30.0  # from a signal to the end: the driver takes back a hung kernel in seconds

ONE_GPU = ("--device", "0")  # unless the options say otherwise: the last one holds


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sweep keeps its store and tables, in ``folder``, and Triton its compiled kernels, in ``cache``."""

    folder: Path
    cache: Path

    @property
    def store(self) -> Path:
        """The trial store."""
        return self.folder / "trials.sqlite"

    @property
    def tables(self) -> Path:
        """The folder of tables."""
        return self.folder / "tables"

    def kernels(self) -> int:
        """Return how many compiled kernels lie in the cache."""
        return sum(1 for _ in self.cache.glob("*/*.cubin"))

    def table_path(self) -> Path:
        """Return the one table of the sweep.

        Raises:
            RunError: there is none, or more than one.
        """
        found = sorted(self.tables.rglob("*.json"))
        if len(found) != 1:
            raise RunError(f"a sweep writes one table, but {self.tables} holds {len(found)}")
        return found[0]

    def table(self) -> TunedTable:
        """Return the table; raises RunError or TableError where there is none to read."""
        return read_table(self.table_path())


@dataclass(frozen=True, slots=True)
class Ended:
    """How a sweep ended: wall seconds, exit code (negative: the signal that killed it), the last line that it said."""

    seconds: float
    code: int
    said: str

    @property
    def failure(self) -> str | None:
        """One sentence where it did not come to its end, else None."""
        if self.code == 0:
            return None
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"
        return f"the sweep {how} after {self.seconds:.0f} s: {self.said or 'it said nothing'}"


def model_options(model: str) -> list[str]:
    """Return the options of a sweep for a model of the catalogue, or for the default layer."""
    return [] if model == DEFAULT_LAYER else ["--model", model]


class Sweep:
    """One running `moetune sweep`; as a context manager it does not outlive the block.

    Args:
        place: where it works.
        options: its options, without those of the place.
        program: what to start: moetune in this very Python.
    """

    def __init__(self, place: Place, options: Sequence[str], program: Sequence[str] = MOETUNE) -> None:
        place.folder.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        here = ["--store", str(place.store), "--out", str(place.tables)]
        self._began_s = time.monotonic()
        self.process = subprocess.Popen(
            [*program, "sweep", *ONE_GPU, *options, *here],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env=os.environ | {"TRITON_CACHE_DIR": str(place.cache)},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        self._log.close()

    def wait(self, limit_s: float) -> Ended | None:
        """Return how it ended, None when it still runs after ``limit_s``."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        return Ended(time.monotonic() - self._began_s, code, self._last_line())

    def kill(self) -> Ended:
        """Kill it at once, as ``kill -9`` does; its other processes end with it."""
        self.process.kill()
        self.process.wait()
        return Ended(time.monotonic() - self._began_s, KILLED, self._last_line())

    def stop(self) -> Ended:
        """End it as Ctrl-C does; a sweep that does not listen is killed."""
        self.process.terminate()
        return self.wait(GRACE_S) or self.kill()

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run_sweep(place: Place, options: Sequence[str], limit_s: float) -> Ended:
    """Run a sweep to its end, or kill it after ``limit_s``, and return how it ended."""
    with Sweep(place, options) as sweep:
        return sweep.wait(limit_s) or _late(sweep.kill(), limit_s)


def _late(killed: Ended, limit_s: float) -> Ended:
    return Ended(killed.seconds, killed.code, f"it had {limit_s:.0f} s, and its last line was: {killed.said}")
