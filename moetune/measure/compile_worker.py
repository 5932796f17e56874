"""The process that compiles: imports torch and triton once, then forks children that compile one kernel after another.

A child that crashes or hangs costs one kernel and is replaced: a fork takes milliseconds where an import takes seconds.
Children live on between kernels because the first compile of a process takes three times as long as the others. Started by :class:`moetune.measure.compiler.CompilePool` as ``python -m moetune.measure.compile_worker``; it
never touches a GPU, and it ends when its standard input does.

Both pipes carry pickles, each behind its length in eight bytes. In: :class:`Setup`, then ``(number, pickled job)``.
Out: ``(number, outcome)``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import pickle
import selectors
import shutil
import signal
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetune.outcome import Compiled, Failed, FailureKind

SCRATCH_PREFIX = "moetune-compile-"
_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 16
_REASON_CHARACTERS = 240
_JOBS_PER_CHILD = 64  # Triton keeps every compiled kernel in memory, half a megabyte each


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the process needs before the first job: how many children, how long each, and modules to import once."""

    workers: int
    limit_s: float
    preload: tuple[str, ...]


@dataclass(slots=True)
class Child:
    """One compiling process: its group, the pipes to and from it, and its job with the moment when it must have ended.

    ``number`` is None while it waits for a job.
    """

    pid: int
    jobs: int
    answers: int
    number: int | None = None
    deadline: float = math.inf
    taken: int = 0
    received: bytearray = field(default_factory=bytearray)


def frame(value: Any) -> bytes:
    """Return ``value`` pickled behind its length."""
    body = pickle.dumps(value)
    return _LENGTH.pack(len(body)) + body


def unframe(buffer: bytearray) -> list[Any]:
    """Take every complete value off the front of ``buffer``."""
    values = []
    while len(buffer) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer)
        if len(buffer) < _LENGTH.size + length:
            break
        values.append(pickle.loads(buffer[_LENGTH.size : _LENGTH.size + length]))  # noqa: S301  # our own pipe
        del buffer[: _LENGTH.size + length]
    return values


def one_line(error: BaseException) -> str:
    r"""Return the error in one short line: its type and the first line that says something.

    >>> one_line(ValueError("first\nsecond"))
    'ValueError: first'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
    text = (telling or lines or ["no message"])[0]
    return f"{type(error).__name__}: {text}"[:_REASON_CHARACTERS]


class Server:
    """Runs jobs in children, at most ``workers`` at a time, each job under its time limit."""

    def __init__(self, requests: int, results: int, setup: Setup) -> None:
        self._requests, self._results, self._setup = requests, results, setup
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._children: dict[int, Child] = {}
        self._buffer = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the request pipe closes, then kill what still runs."""
        try:
            while self._serve_once():
                pass
        finally:
            for child in list(self._children.values()):
                self._end(child)

    def _serve_once(self) -> bool:
        while self._waiting and (child := self._free_child()) is not None:
            self._give(child, *self._waiting.popleft())
        for key, _ in self._selector.select(self._seconds_to_deadline()):
            if key.fd == self._requests:
                data = os.read(self._requests, _READ_BYTES)
                if not data:
                    return False
                self._buffer += data
                self._waiting.extend(unframe(self._buffer))
            else:
                self._hear(self._children[key.fd])
        self._stop_late_children()
        return True

    def _seconds_to_deadline(self) -> float | None:
        deadline = min((child.deadline for child in self._children.values()), default=math.inf)
        return None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)

    def _free_child(self) -> Child | None:
        """Return a child without a job, a new one if need be, or None when all that may run are busy."""
        idle = next((child for child in self._children.values() if child.number is None), None)
        if idle is not None or len(self._children) >= self._setup.workers:
            return idle
        jobs, job = os.pipe()
        answers, answer = os.pipe()
        pid = os.fork()
        if pid == 0:
            for other in self._children.values():  # else a sibling would never see the end of its jobs
                os.close(other.jobs)
                os.close(other.answers)
            os.close(job)
            os.close(answers)
            _compile_until_told(jobs, answer)
        os.close(jobs)
        os.close(answer)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here and in the child: whoever comes first
        child = Child(pid, job, answers)
        self._children[answers] = child
        self._selector.register(answers, selectors.EVENT_READ)
        return child

    def _give(self, child: Child, number: int, job: bytes) -> None:
        child.number, child.deadline, child.taken = number, time.monotonic() + self._setup.limit_s, child.taken + 1
        with contextlib.suppress(BrokenPipeError):  # it died while idle: its end is heard, and the job fails
            _write(child.jobs, frame(job))

    def _hear(self, child: Child) -> None:
        data = os.read(child.answers, _READ_BYTES)
        if not data:
            status = self._end(child)
            if child.number is not None:
                self._answer(child.number, Failed(FailureKind.COMPILE, _death(status)))
            return
        child.received += data
        for outcome in unframe(child.received):
            assert child.number is not None, "a child answers only what it was asked"
            self._answer(child.number, outcome)
            child.number, child.deadline = None, math.inf
            if child.taken >= _JOBS_PER_CHILD:
                self._end(child)

    def _stop_late_children(self) -> None:
        now = time.monotonic()
        for child in [child for child in self._children.values() if child.deadline <= now]:
            self._end(child)
            assert child.number is not None, "an idle child has no deadline"
            reason = f"still compiling after {self._setup.limit_s:g} s"
            self._answer(child.number, Failed(FailureKind.TIMEOUT, reason))

    def _end(self, child: Child) -> int:
        """Kill the child's whole process group (ptxas included), reap it and return its wait status."""
        self._selector.unregister(child.answers)
        os.close(child.answers)
        os.close(child.jobs)
        del self._children[child.answers]
        finished, status = os.waitpid(child.pid, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        return status if finished else os.waitpid(child.pid, 0)[1]

    def _answer(self, number: int, outcome: Compiled | Failed) -> None:
        _write(self._results, frame((number, outcome)))


def _write(pipe: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _death(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return (
        f"the compiler's process was killed by signal {-code}"
        if code < 0
        else f"the compiler's process exited with {code}"
    )


def _compile_until_told(jobs: int, answer: int) -> None:
    """Compile in the child, job after job, and leave without running any of the parent's exit handlers."""
    try:
        os.setpgid(0, 0)
        while True:
            _write(answer, frame(_outcome(_read_one(jobs))))
    finally:
        os._exit(0)  # the pool closed its end, or a job broke more than itself: the server hears that nothing came


def _outcome(job: bytes) -> Compiled | Failed:
    try:
        return pickle.loads(job).compile()  # noqa: S301  # our own pipe
    except MemoryError:
        return Failed(FailureKind.COMPILE, "the compiler ran out of host memory; give the pool fewer workers")
    except Exception as error:  # noqa: BLE001  # the compiler may raise anything, and one kernel must not end the rest
        return Failed(FailureKind.COMPILE, one_line(error))


def _warm_up(preload: tuple[str, ...]) -> None:
    """Do once what every child would do: imports, the hash of Triton itself, the hash of each kernel's source."""
    import triton

    for name in preload:
        for value in list(vars(importlib.import_module(name)).values()):
            if isinstance(value, triton.JITFunction):
                _ = value.cache_key
    gc.freeze()  # children share these pages as long as no collection writes to them


def _private_pipes() -> tuple[int, int]:
    """Move the protocol off the standard streams, which compilers print whole programs to."""
    requests, results = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return requests, results


def _read_one(requests: int) -> Any:
    head = _read_exactly(requests, _LENGTH.size)
    return pickle.loads(_read_exactly(requests, _LENGTH.unpack(head)[0]))  # noqa: S301  # our own pipe


def _read_exactly(requests: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(requests, count - len(data))
        if not piece:
            raise EOFError("the other end closed")
        data += piece
    return data


def main() -> None:
    """Serve one pool. Ctrl-C is the pool's business: it closes our input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        requests, results = _private_pipes()
        setup = _read_one(requests)
        _warm_up(setup.preload)
        os.dup2(1, 2)  # start-up errors went to the pool's log; from here on it is compilers' noise
        Server(requests, results, setup).run()
    finally:
        _remove_scratch()


def _remove_scratch() -> None:
    """Remove the pool's folder for temporary files: the pool does it too, unless it was killed."""
    scratch = Path(os.environ.get("TMPDIR", ""))
    if scratch.name.startswith(SCRATCH_PREFIX):
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.modules.setdefault("moetune.measure.compile_worker", sys.modules["__main__"])  # Setup pickles under this name
    main()
