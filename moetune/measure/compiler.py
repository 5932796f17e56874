"""Compile kernels in parallel without touching a GPU: live sweeps, ``sweep --target`` and CI use the same pool."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pickle
import select
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, Self, TypeVar

from moetune.errors import RunError
from moetune.measure.compile_job import KernelJob
from moetune.measure.compile_messages import RECALLED, SCRATCH_PREFIX, Recall, Setup, frame, unframe
from moetune.outcome import Compiled, Failed

DEFAULT_LIMIT_S = 60.0  # the slowest useful kernel of 120 took 5.7 s; ptxas has been seen to never return
_JOBS_AHEAD = 3  # per worker: work for while the tuner is busy; what none has begun can be withdrawn
_READ_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20  # what Linux gives anyone
_LOG_CHARACTERS = 500
_GRACE_S = 5.0
Key = TypeVar("Key")


class Job(Protocol):
    """Anything that a process of the pool can be given: it must pickle, and so must what it returns."""

    def compile(self) -> Any:
        """Do the work, in a process that never launches a kernel."""
        ...


class CompilePool:
    """Worker processes that compile kernels; close it, or use it as a context manager.

    Args:
        workers: kernels compiled at the same time; one less than the machine's cores when None.
        limit_s: seconds after which one compile is killed and counts as failed.
        preload: modules that every job needs, imported once.
    """

    def __init__(
        self, *, workers: int | None = None, limit_s: float = DEFAULT_LIMIT_S, preload: tuple[str, ...] = ()
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the pool
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moetune.measure.compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(self._scratch.name),
            start_new_session=True,  # Ctrl-C goes to the tuner alone, which then closes the pool
        )
        _widen(self._process)
        self._buffer = bytearray()
        self._numbers = itertools.count()
        self._outcomes: dict[int, Any] = {}
        self._dropped: set[int] = set()
        self._waiting: deque[tuple[Any, Job]] = deque()
        self._submitted: dict[int, Any] = {}
        self._has_answered = False
        self._recalled: list[int] | None = None
        count = workers if workers is not None else default_workers()
        self._window = _JOBS_AHEAD * count
        self._send(frame(Setup(workers=count, limit_s=limit_s, preload=preload)))

    def compile(self, jobs: Iterable[tuple[Key, KernelJob]]) -> Iterator[tuple[Key, Compiled | Failed]]:
        """Compile ``(key, job)`` pairs and yield ``(key, outcome)`` as each ends, in any order.

        Raises:
            RunError: the compile process itself ended, which is a fault of the installation.
        """
        todo = iter(jobs)
        waiting: dict[int, Key] = {}
        try:
            while True:
                # Few jobs at a time: both pipes stay far from full, so neither side can wait for the other.
                for key, job in itertools.islice(todo, self._window - len(waiting)):
                    number = next(self._numbers)
                    waiting[number] = key
                    self._send(frame((number, pickle.dumps(job))))
                if not waiting:
                    return
                number = self._await(waiting)
                yield waiting.pop(number), self._outcomes.pop(number)
        finally:
            self._dropped |= set(waiting)

    def submit(self, jobs: Iterable[tuple[Any, Job]]) -> None:
        """Queue ``(key, job)`` pairs, in their order, and return at once; :meth:`ended` tells of them.

        What is to come before others that wait is queued after these were withdrawn, and these behind it.

        Raises:
            RunError: the compile process itself ended.
        """
        self._waiting.extend(jobs)
        self._feed()

    def ended(self, wait_s: float = 0.0) -> list[tuple[Any, Any]]:
        """Return ``(key, outcome)`` of every submitted job that ended since the last call: what it returned, or Failed.

        Between two calls no process is left without work for as long as it has ``_JOBS_AHEAD`` kernels to compile.

        Args:
            wait_s: how long to wait for the first one where none has ended and some are under way.

        Raises:
            RunError: the compile process itself ended.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            while self._is_readable(0.0):
                self._take_in()
            numbers = [number for number in self._outcomes if number in self._submitted]
            left_s = deadline_s - time.monotonic()
            if numbers or not self._submitted or left_s <= 0:
                break
            self._is_readable(left_s)
        found = [(self._submitted.pop(number), self._outcomes.pop(number)) for number in numbers]
        self._feed()
        return found

    def withdraw(self) -> list[Any]:
        """Take back what no process has begun, and return the keys in their order.

        Raises:
            RunError: the compile process itself ended.
        """
        keys = [self._submitted.pop(number) for number in self._recall()]
        keys += [key for key, _ in self._waiting]
        self._waiting.clear()
        return keys

    def _recall(self) -> list[int]:
        """Return the numbers of the submitted jobs that the compile process has, and now has no longer.

        While it still imports it would be seconds before it answers; then it keeps what was sent.
        """
        sent = self._submitted.keys() - self._outcomes.keys()
        if not sent or not self._has_answered:
            return []
        self._send(frame(Recall(frozenset(sent))))
        while self._recalled is None:
            self._take_in()
        recalled, self._recalled = self._recalled, None
        return recalled

    @property
    def unfinished(self) -> int:
        """Submitted jobs that :meth:`ended` has not told of."""
        return len(self._waiting) + len(self._submitted)

    def _feed(self) -> None:
        while self._waiting and len(self._submitted) < self._window:
            key, job = self._waiting.popleft()
            number = next(self._numbers)
            self._submitted[number] = key
            self._send(frame((number, pickle.dumps(job))))

    def _await(self, waiting: Mapping[int, object]) -> int:
        """Return the number of one of the ``waiting`` jobs that has ended."""
        while True:
            ended = next((number for number in self._outcomes if number in waiting), None)
            if ended is not None:
                return ended
            self._take_in()

    def _is_readable(self, wait_s: float) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], wait_s)[0])

    def _take_in(self) -> None:
        for number, outcome in self._receive():
            self._has_answered = True
            if number == RECALLED:
                self._recalled = outcome
            elif number in self._dropped:
                self._dropped.discard(number)
            else:
                self._outcomes[number] = outcome

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._ended() from None

    def _receive(self) -> list[tuple[int, Any]]:
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), _READ_BYTES)
        if not data:
            raise self._ended()
        self._buffer += data
        return unframe(self._buffer)

    def _ended(self) -> RunError:
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        said = next(
            (line.strip() for line in reversed(lines) if line.strip()), "it said nothing"
        )  # of a traceback, too
        return RunError(f"the compile process ended: {said[:_LOG_CHARACTERS]}; run `moetune doctor`")

    def close(self) -> None:
        """End the process and all that it compiles; safe to call twice."""
        if next(self._numbers) == 0:  # no job was ever sent, so it has no children, and may import for seconds yet
            self._process.kill()
        if self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._log.close()
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _widen(process: subprocess.Popen[bytes]) -> None:
    """Let both pipes hold all jobs that are under way on hundreds of cores: 64 KiB are those of 40, at half a KiB each.

    While the process imports, for seconds, it reads nothing, and the tuner must not wait for that.
    """
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(OSError):  # the system allows less
            fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers() -> int:
    """Return one less than these cores, which somebody who measures meanwhile needs, at least one."""
    return max(usable_cores() - 1, 1)


def _environment(scratch: str) -> dict[str, str]:
    """Return the worker's environment: the same imports and Triton settings, no GPU, temporary files to be swept."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    return environment | hidden | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": scratch}
