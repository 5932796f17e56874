"""One GPU process after the other: when one is lost, the next question starts another and opens what was open."""

from __future__ import annotations

import itertools
import time
from typing import Any

from moetune.engine.backend import Ceilings
from moetune.errors import RunError
from moetune.measure.gpu_messages import Answer, Ask, Learned, Ready, Refused, Start
from moetune.measure.gpu_process import GpuProcess, ProcessEndedError
from moetune.measure.isolated_limits import Limits
from moetune.outcome import Compiled, Failed, FailureKind
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo

MAX_FRUITLESS = 3  # new processes in a row that ended before they answered anything: the GPU itself is gone
PAUSE_S = 1.0  # before the next one where memory was missing: a driver takes back a dead process's a little later
OPEN = "open"


class RespawningGpu:
    """Asks the GPU process that lives; the caller sees from ``lost`` in an answer that it was the last one of its process.

    Args:
        start: what each process loads.
        limits: seconds of each question.

    Raises:
        MoetuneError: what the first process says when it cannot start.
        RunError: processes end one after the other.

    Attributes:
        compiled: what every new process is told about kernels.
        ceilings: what it is told about the device.
    """

    def __init__(self, start: Start, limits: Limits) -> None:
        self.compiled: dict[tuple[Role, MoEKernelConfig], Compiled] = {}
        self.ceilings: Ceilings | None = None
        self._start_message, self._limits = start, limits
        self._numbers, self._fruitless = itertools.count(), 0
        self._tokens: int | None = None
        self._device: DeviceInfo | None = None
        self._process: GpuProcess | None = None
        self._start()

    @property
    def device(self) -> DeviceInfo:
        """The GPU that answers."""
        assert self._device is not None
        return self._device

    @property
    def pid(self) -> int | None:
        """The id of the process that lives, None between two."""
        return self._process.pid if self._process is not None else None

    @property
    def has_answered(self) -> bool:
        """Whether a process lives that answered something."""
        return self._process is not None and self._process.completed

    def ask(self, method: str, *arguments: Any) -> Answer:
        """Ask a process that has the token count open which ``open`` opened last.

        Raises:
            RunError: new processes end one after the other before they answer anything.
        """
        if method == OPEN:
            self._tokens = None
        self._make_ready()
        answer = self._put(method, *arguments)
        if method == OPEN and answer.lost is None and answer.value is None:
            self._tokens = arguments[0]
        return answer

    def end(self) -> None:
        """End the process that lives, at once; the next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _make_ready(self) -> None:
        """Start a process where there is none, and open the token count that was open in the last one."""
        while True:
            process = self._process or self._start()
            if self._tokens is None or process.tokens == self._tokens:
                return
            answer = self._put(OPEN, self._tokens)
            if answer.lost is None and answer.value is not None:
                self._lose(answer.value)

    def _put(self, method: str, *arguments: Any) -> Answer:
        process = self._process
        assert process is not None
        tokens = arguments[0] if method == OPEN else self._tokens or 0
        news = dict(itertools.islice(self.compiled.items(), process.told, None))
        learned = Learned(compiled=news, ceilings=self.ceilings)
        ask = Ask(number=next(self._numbers), method=method, arguments=arguments, learned=learned)
        try:
            answer = process.ask(ask, self._limits(method, arguments, tokens))
        except ProcessEndedError as ended:
            answer = Answer(number=ask.number, lost=ended.failed)
        except BaseException:  # Ctrl-C: what it is doing is nobody's business any more
            self.end()
            raise
        if answer.lost is not None:
            self._lose(answer.lost)
            return answer
        process.told += len(news)
        if method == OPEN:
            process.tokens = tokens if answer.value is None else None
        if method != OPEN or answer.value is None:
            process.completed, self._fruitless = True, 0
        return answer

    def _start(self) -> GpuProcess:
        while True:
            process = self._process = GpuProcess(self._start_message)
            ready = self._introduced(process)
            if isinstance(ready, Ready):
                break
            if isinstance(ready, Refused) and self._device is None:
                self.end()
                raise ready.error
            self._lose(Failed(FailureKind.LAUNCH, str(ready.error)) if isinstance(ready, Refused) else ready)
        if self._device not in (None, ready.device):
            self.end()
            was, now = self._device and self._device.name, ready.device.name
            raise RunError(
                f"the GPU changed while it was tuned, from {was} to {now}; every trial so far is kept: "
                "run `moetune doctor`, then the same command again"
            )
        self._device = ready.device
        return process

    def _introduced(self, process: GpuProcess) -> Ready | Refused | Failed:
        try:
            return process.ready(self._limits("start", (), 0))
        except ProcessEndedError as ended:
            return ended.failed
        except BaseException:
            self.end()
            raise

    def _lose(self, failed: Failed) -> None:
        """Let go of a process that is of no more use, and give up when that is all that new ones are."""
        self._fruitless += not self.has_answered
        self.end()
        if self._fruitless >= MAX_FRUITLESS:
            raise gone(failed)
        if self._fruitless:
            time.sleep(PAUSE_S)


def gone(failed: Failed) -> RunError:
    """Return the error that ends a sweep whose GPU answers nothing any more, the last time as ``failed`` says."""
    return RunError(
        f"the GPU gives no more answers: {MAX_FRUITLESS} new processes in a row were of no use, the last time: "
        f"{failed.reason}; every trial so far is kept: run `moetune doctor`, then the same command again"
    )
