"""The tuner's end of one GPU process: starts it, asks it within a time limit, and ends it with all that it started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

from moetune.errors import RunError
from moetune.measure.faults import dead, silent, torn
from moetune.measure.gpu_messages import (
    HANDSHAKE,
    Answer,
    Ask,
    Inbox,
    Ready,
    Refused,
    Start,
    Stop,
    Stopped,
    TornMessageError,
    packed,
)
from moetune.outcome import Failed

MODULE = "moetune.measure.gpu_worker"
_TICK_S = 0.2  # until a silent process is looked at: one that left a child behind closes no pipe
_READ_BYTES = 1 << 16
_EXIT_S = 2.0  # from a closed pipe to the exit code
_KILL_S = 30.0  # a driver takes seconds to take back what a hung kernel holds
_LOG_BYTES = 1 << 20
_TAIL_BYTES = 4096


class ProcessEndedError(Exception):
    """The process is of no more use; ``failed`` says why, as the end of the trial that it had in hand."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.reason)
        self.failed = failed


class GpuProcess:
    """One GPU process, from its start to its end. It does not outlive the thread that made it.

    It imports what it needs at once; until :meth:`begin` it touches no GPU.

    Args:
        preload: the module that it imports while it waits for :meth:`begin`.

    Attributes:
        begun: whether it was told what to load.
        is_ready: whether it has loaded it.
        tokens: the token count that is open in it, None before the first.
        completed: whether it ever answered a question.
        told: how many compiled kernels it was told of.
        knows_ceilings: whether it was told what the device reaches.
    """

    def __init__(self, preload: str) -> None:
        self.begun = self.is_ready = False
        self.tokens: int | None = None
        self.completed = False
        self.told, self.knows_ceilings = 0, False
        self._stopped_number, self._unread = -1, 0  # of the last question of several answers that was broken off
        self._ending = threading.Lock()
        self._inbox = Inbox()
        self._log = _log_file()
        theirs_in, self._questions = os.pipe()
        self._answers, theirs_out = os.pipe()
        os.set_blocking(self._questions, False)  # a process that does not read must not stop the tuner
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._answers, select.POLLIN)
        self._writable.register(self._questions, select.POLLOUT)
        try:
            self._process = _started(theirs_in, theirs_out, self._log, preload)
        except OSError as error:
            self._let_go()
            raise RunError(
                f"the GPU process could not be started: {error.strerror}; every trial so far is kept: end other "
                "programs, then run the same command again"
            ) from None
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._ended = False

    @property
    def pid(self) -> int:
        """The process id, which is its group's too."""
        return self._process.pid

    def begin(self, start: Start, limit_s: float) -> None:
        """Let it load the trials, which uses the GPU; returns at once.

        Raises:
            ProcessEndedError: it died, or read nothing for ``limit_s``.
        """
        self.begun = True
        self._send(packed(start), time.monotonic() + limit_s, limit_s)

    def ready(self, limit_s: float) -> Ready | Refused:
        """Wait until the trials are loaded, after :meth:`begin`.

        Raises:
            ProcessEndedError: it died, said nothing for ``limit_s``, or said something else.
        """
        message = self._receive(time.monotonic() + limit_s, limit_s)
        if isinstance(message, Refused) or (isinstance(message, Ready) and message.handshake == HANDSHAKE):
            self.is_ready = isinstance(message, Ready)
            return message
        raise self._end(torn("it did not introduce itself"))

    def ask(self, ask: Ask, limit_s: float) -> Answer:
        """Put one question and return its answer.

        Raises:
            ProcessEndedError: it died, gave no answer within ``limit_s``, or answered something else.
        """
        deadline = time.monotonic() + limit_s
        self._send(packed(ask), deadline, limit_s)
        return self._answer_to(ask.number, deadline, limit_s)

    def ask_each(self, ask: Ask, limit_s: float) -> Generator[Answer]:
        """Put a question of several answers and yield each as it comes; the process goes on meanwhile.

        Where the generator is closed before the last one, the process is told to stop; what it had in hand must be read by
        :meth:`settle` before the next question.

        Args:
            ask: with the number of its answers.
            limit_s: seconds that each of them may take.

        Raises:
            ProcessEndedError: as :meth:`ask`, of the first answer that did not come.
        """
        left = ask.answers or 0
        try:
            self._send(packed(ask), time.monotonic() + limit_s, limit_s)
            while left:
                answer = self._answer_to(ask.number, time.monotonic() + limit_s, limit_s)
                left = 0 if answer.lost is not None else left - 1
                yield answer
        finally:
            if left and not self._ended:
                self._stopped_number, self._unread = ask.number, left
                # A broken process is found by who asks next.
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    os.write(self._questions, packed(Stop(ask.number)))

    def settle(self, limit_s: float) -> None:
        """Wait until a question that was broken off is over, and drop what was answered since; returns at once without one.

        Raises:
            ProcessEndedError: what it had in hand was the end of it, or it ended with nothing in hand.
        """
        while self._unread:
            message = self._receive(time.monotonic() + limit_s, limit_s)
            if isinstance(message, Answer) and message.number == self._stopped_number:
                self._unread -= 1
                if message.lost is not None:
                    raise self._end(message.lost)
            elif isinstance(message, Stopped) and message.number == self._stopped_number:
                self._unread = 0
            else:
                raise self._end(torn("its answer is to another question"))
        if self._is_dead():
            raise self._end(self._death())

    def _answer_to(self, number: int, deadline: float, limit_s: float) -> Answer:
        message = self._receive(deadline, limit_s)
        self._trim_log()
        if not isinstance(message, Answer) or message.number != number:
            raise self._end(torn("its answer is to another question"))
        return message

    def close(self) -> None:
        """End the process and all that it started, at once; safe to call twice.

        Raises:
            RunError: the driver does not let go of it.
        """
        with self._ending:
            if self._ended:
                return
            self._ended = True
        try:
            self._kill()
        finally:
            self._let_go()

    def kill(self) -> None:
        """Kill the process from another thread than the one that asks it, which finds it dead and closes it."""
        with self._ending:
            if not self._ended:
                self._kill_group()

    def _let_go(self) -> None:
        for pipe in (self._questions, self._answers):
            os.close(pipe)
        self._log.close()

    def _kill(self) -> None:
        self._kill_group()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            raise RunError(
                f"the driver does not let go of process {self._process.pid}, whose kernel hangs; every trial so far is "
                "kept: reset the GPU (`nvidia-smi --gpu-reset`), then run the same command again"
            ) from None

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own

    def _send(self, data: bytes, deadline: float, limit_s: float) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._questions, left) :]
            except BlockingIOError:
                if not self._writable.poll(1000 * _TICK_S) and time.monotonic() > deadline:
                    raise self._end(silent(limit_s)) from None
            except BrokenPipeError:
                raise self._end(self._death()) from None

    def _receive(self, deadline: float, limit_s: float) -> Any:
        was_dead = False
        try:
            while (message := self._inbox.take()) is None:
                left_s = max(deadline - time.monotonic(), 0.0)  # none where the tuner itself was stopped meanwhile
                if self._readable.poll(0 if was_dead else 1000 * min(left_s, _TICK_S)):
                    self._inbox.add(self._read())
                elif was_dead:  # and whatever it said before was read
                    raise self._end(self._death())
                elif not left_s:
                    raise self._end(silent(limit_s))
                else:
                    was_dead = self._is_dead()
        except TornMessageError as error:
            raise self._end(torn(str(error))) from error
        return message

    def _read(self) -> bytes:
        data = os.read(self._answers, _READ_BYTES)
        if not data:
            raise self._end(self._death())
        return data

    def _is_dead(self) -> bool:
        """Whether it ended; it is not reaped, so that its group's number stays its own until that is killed."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # whoever started the tuner told the kernel to reap its children (SIGCHLD ignored)
            return True

    def _death(self) -> Failed:
        deadline = time.monotonic() + _EXIT_S
        while not self._is_dead():
            if time.monotonic() > deadline:
                return torn("it closed its answers")
            time.sleep(0.01)
        return dead(self._exit_code(), self._said())

    def _exit_code(self) -> int | None:
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return None
        assert found is not None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _end(self, failed: Failed) -> ProcessEndedError:
        self.close()
        return ProcessEndedError(failed)

    def _said(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _TAIL_BYTES, max(size - _TAIL_BYTES, 0)).decode(errors="replace")

    def _trim_log(self) -> None:
        if os.fstat(self._log.fileno()).st_size > _LOG_BYTES:
            os.ftruncate(self._log.fileno(), 0)


def _started(questions: int, answers: int, log: IO[bytes], preload: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -P: what lies in the current folder is not imported, as in the tuner itself.
        [sys.executable, "-P", "-m", MODULE, str(questions), str(answers), str(os.getpid()), preload],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(questions, answers),
        env=os.environ | {"PYTHONPATH": _import_path()},
        start_new_session=True,  # Ctrl-C goes to the tuner alone, which then ends this group
    )


def _log_file() -> IO[bytes]:
    """Return a file without a name that is appended to, so that it can be cut while it is written."""
    log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
    fcntl.fcntl(log, fcntl.F_SETFL, fcntl.fcntl(log, fcntl.F_GETFL) | os.O_APPEND)
    return log


def _import_path() -> str:
    return os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
