"""The process that compiles: imports torch and triton once, then forks children that compile one kernel after another.

A child that crashes or hangs costs one kernel and is replaced: a fork takes milliseconds where an import takes seconds.
Children live on between kernels because the first compile of a process takes longer than the others. What the compiled
kernels are made of is read for several at once: the disassembler takes 0.2 s to start and 0.03 s for a kernel.

Started by :class:`moetune.measure.compiler.CompilePool` as ``python -m moetune.measure.compile_worker``; it never touches
a GPU, and it ends when its standard input does.

What both pipes carry says :mod:`moetune.measure.compile_messages`.
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
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetune.measure.compile_messages import RECALLED, SCRATCH_PREFIX, Recall, Setup, frame, read_one, unframe, write
from moetune.measure.unread import ReadMixes, Unread
from moetune.outcome import Failed, FailureKind

_READ_BYTES = 1 << 16
_REASON_CHARACTERS = 240
_MOST_READ_TOGETHER = (
    8  # kernels: what is left of the disassembler's start, 0.2 s, is then less than the reading itself
)
_JOBS_PER_CHILD = 64  # Triton keeps every compiled kernel in memory, half a megabyte each


@dataclass(slots=True)
class Child:
    """One compiling process: its group, the pipes to and from it, and its work with the moment when it must have ended.

    ``work`` is a job's number, or the jobs whose compiled kernels it reads, or None while it waits for something to do.
    """

    pid: int
    jobs: int
    answers: int
    work: int | list[tuple[int, Unread]] | None = None
    deadline: float = math.inf
    taken: int = 0
    received: bytearray = field(default_factory=bytearray)


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
        self._unread: list[tuple[int, Unread]] = []
        self._read_together = min(setup.workers, _MOST_READ_TOGETHER)
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
        while (self._waiting or self._unread) and (child := self._free_child()) is not None:
            self._give_next(child)
        for key, _ in self._selector.select(self._seconds_to_deadline()):
            if key.fd == self._requests:
                data = os.read(self._requests, _READ_BYTES)
                if not data:
                    return False
                self._buffer += data
                for request in unframe(self._buffer):
                    self._take_request(request)
            else:
                self._hear(self._children[key.fd])
        self._stop_late_children()
        return True

    def _take_request(self, request: tuple[int, bytes] | Recall) -> None:
        if not isinstance(request, Recall):
            self._waiting.append(request)
            return
        recalled = [number for number, _ in self._waiting if number in request.numbers]
        self._waiting = deque(job for job in self._waiting if job[0] not in request.numbers)
        self._answer(RECALLED, recalled)

    def _seconds_to_deadline(self) -> float | None:
        deadline = min((child.deadline for child in self._children.values()), default=math.inf)
        return None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)

    def _free_child(self) -> Child | None:
        """Return a child without a job, a new one if need be, or None when all that may run are busy."""
        idle = next((child for child in self._children.values() if child.work is None), None)
        if idle is not None or len(self._children) >= self._setup.workers:
            return idle
        jobs, job = os.pipe()
        answers, answer = os.pipe()
        pid = os.fork()
        if pid == 0:
            for other in self._children.values():  # else a sibling would never see the end of its jobs
                os.close(other.jobs)
                os.close(other.answers)
            for mine in (job, answers, self._requests, self._results):  # nor the pool the end of this process
                os.close(mine)
            _compile_until_told(jobs, answer)
        os.close(jobs)
        os.close(answer)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here and in the child: whoever comes first
        child = Child(pid, job, answers)
        self._children[answers] = child
        self._selector.register(answers, selectors.EVENT_READ)
        return child

    def _give_next(self, child: Child) -> None:
        """Give it the next job, or what is to be read, once that is as many kernels as end while one compiles.

        Where no job waits, a process would idle: then all is read that there is.
        """
        if len(self._unread) >= self._read_together or not self._waiting:
            work, self._unread = self._unread[: self._read_together], self._unread[self._read_together :]
            self._give(child, work, pickle.dumps(ReadMixes(tuple(unread for _, unread in work))))
        else:
            self._give(child, *self._waiting.popleft())
            child.taken += 1

    def _give(self, child: Child, work: int | list[tuple[int, Unread]], job: bytes) -> None:
        child.work, child.deadline = work, time.monotonic() + self._setup.limit_s
        with contextlib.suppress(BrokenPipeError):  # it died while idle: its end is heard, and the job fails
            write(child.jobs, frame(job))

    def _hear(self, child: Child) -> None:
        data = os.read(child.answers, _READ_BYTES)
        if not data:
            self._give_up(child, Failed(FailureKind.COMPILE, _death(self._end(child))))
            return
        child.received += data
        for outcome in unframe(child.received):
            self._take_answer(child, outcome)
            child.work, child.deadline = None, math.inf
            if child.taken >= _JOBS_PER_CHILD:
                self._end(child)

    def _take_answer(self, child: Child, outcome: Any) -> None:
        assert child.work is not None, "a child answers only what it was asked"
        if isinstance(child.work, int):
            if isinstance(outcome, Unread):
                self._unread.append((child.work, outcome))
            else:
                self._answer(child.work, outcome)
        elif isinstance(outcome, list):
            for (number, _), compiled in zip(child.work, outcome, strict=True):
                self._answer(number, compiled)
        else:
            self._give_up(child, outcome)

    def _give_up(self, child: Child, failed: Failed) -> None:
        """Answer for a child that did not do its work; kernels that could not be read are compiled all the same."""
        if isinstance(child.work, int):
            self._answer(child.work, failed)
        else:
            for number, unread in child.work or ():
                self._answer(number, unread.compiled)

    def _stop_late_children(self) -> None:
        now = time.monotonic()
        for child in [child for child in self._children.values() if child.deadline <= now]:
            self._end(child)
            self._give_up(child, Failed(FailureKind.TIMEOUT, f"still compiling after {self._setup.limit_s:g} s"))

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

    def _answer(self, number: int, outcome: Any) -> None:
        write(self._results, frame((number, outcome)))


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
            write(answer, frame(_outcome(read_one(jobs))))
    finally:
        os._exit(0)  # the pool closed its end, or a job broke more than itself: the server hears that nothing came


def _outcome(job: bytes) -> Any:
    try:
        return pickle.loads(job).compile()  # noqa: S301  # our own pipe
    except MemoryError:
        return Failed(FailureKind.COMPILE, "the compiler ran out of host memory; give the pool fewer workers")
    except Exception as error:  # noqa: BLE001  # the compiler may raise anything, and one kernel must not end the rest
        return Failed(FailureKind.COMPILE, one_line(error))


def _warm_up(preload: tuple[str, ...]) -> None:
    """Do once what every child would do: imports, the hash of Triton itself, the hash of each kernel's source."""
    gc.disable()  # it finds nothing in what imports make, and takes an eighth of their time
    import triton

    hashing = threading.Thread(target=_hash_triton)  # 0.3 s, most of them in the hash function, while torch is imported
    hashing.start()
    try:
        for name in preload:
            for value in list(vars(importlib.import_module(name)).values()):
                if isinstance(value, triton.JITFunction):
                    _ = value.cache_key
    finally:
        hashing.join()
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.experimental.gluon")  # the first call of a kernel imports it
    gc.freeze()  # children share these pages as long as no collection writes to them
    gc.enable()


def _hash_triton() -> None:
    """Hash Triton's 400 MB, which every cache key begins with; where this Triton does it elsewhere, each child does it."""
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def _private_pipes() -> tuple[int, int]:
    """Move the protocol off the standard streams, which compilers print whole programs to."""
    requests, results = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return requests, results


def main() -> None:
    """Serve one pool. Ctrl-C is the pool's business: it closes our input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        requests, results = _private_pipes()
        setup = read_one(requests)
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
    main()
