"""One GPU process after the other: when one is lost, the next question starts another and opens what was open."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
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
CLOSE_TICK_S = 0.05  # between two looks whether the thread that asks has let go
OPEN = "open"


class News:
    """What every new process is told; the GPUs of one sweep share it, and their threads ask at the same time.

    Attributes:
        ceilings: what the device reaches, None before it was measured.
    """

    def __init__(self) -> None:
        self.ceilings: Ceilings | None = None
        self._compiled: dict[tuple[Role, MoEKernelConfig], Compiled] = {}
        self._lock = threading.Lock()

    def add(self, kernels: Iterable[tuple[tuple[Role, MoEKernelConfig], Compiled]]) -> None:
        """Take in what the compiler reported."""
        with self._lock:
            self._compiled.update(kernels)

    def compiled(self, after: int = 0) -> dict[tuple[Role, MoEKernelConfig], Compiled]:
        """Return the reports in their order, without the first ``after``, which a process was told of."""
        with self._lock:
            if after == len(self._compiled):
                return {}
            return dict(itertools.islice(self._compiled.items(), after, None))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStart:
    """What is there before a GPU's first process has said anything.

    Args:
        device: the GPU as its driver describes it, None where that has to be asked of the process.
        news: what processes are told, shared with those of other GPUs; this GPU's own when None.
        process: one that imports already and was told nothing; a new one is started when None.
    """

    device: DeviceInfo | None = None
    news: News | None = None
    process: GpuProcess | None = None


NO_HEAD_START = HeadStart()


class RespawningGpu:
    """Asks the GPU process that lives; the caller sees from ``lost`` in an answer that it was the last one of its process.

    The first process is started at once and imports what it needs. It uses the GPU from :meth:`begin` on, and is waited
    for where the first answer is needed.

    Args:
        start: what each process loads.
        limits: seconds of each question.
        given: what is there already; its process is closed with this.

    Raises:
        RunError: no process can be started.

    Attributes:
        news: what every new process is told.
    """

    def __init__(self, start: Start, limits: Limits, given: HeadStart = NO_HEAD_START) -> None:
        self.news = given.news or News()
        self._asking, self._is_closed = threading.RLock(), False
        self._start_message, self._limits = start, limits
        self._numbers, self._fruitless = itertools.count(), 0
        self._tokens: int | None = None
        self._device, self._is_confirmed = given.device, False  # until a process has said the same
        self._tell: Callable[[], object] | None = None
        self._process: GpuProcess | None = given.process or self._new_process()

    @property
    def device(self) -> DeviceInfo:
        """The GPU that answers; waits for the process where the driver did not describe it.

        Raises:
            MoetuneError: what the first process says when it cannot load the trials.
            RunError: processes end one after the other.
        """
        if self._device is None:
            self._ready()
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

    def begin(self) -> None:
        """Let the process use the GPU and load the trials meanwhile; a question does that too.

        Raises:
            RunError: processes end one after the other.
        """
        if self._process is not None and not self._process.begun:
            ended = self._begun(self._process)
            if ended is not None:
                self._lose(ended)

    def when_ready(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` once, before the next question is put; it may ask some itself."""
        self._tell = tell

    def ask(self, method: str, *arguments: Any) -> Answer:
        """Ask a process that has the token count open which ``open`` opened last.

        Raises:
            MoetuneError: what the first process says when it cannot load the trials.
            RunError: new processes end one after the other before they answer anything, or on another GPU; or this was
                closed meanwhile.
        """
        with self._asking:
            if method == OPEN:
                self._tokens = None
            self._make_ready()
            answer = self._put(method, *arguments)
            if method == OPEN and answer.lost is None and answer.value is None:
                self._tokens = arguments[0]
            return answer

    def ask_each(self, method: str, role: Role, configs: Sequence[MoEKernelConfig], *more: Any) -> Generator[Answer]:
        """Ask about several kernels at once, and yield the answer about each as it comes.

        The process goes on with the next one meanwhile. It is the last answer where ``lost`` says so: what comes after it
        was not begun. Close the generator where the rest is not wanted; there may be no other question before that.

        Args:
            method: of the trials; called with all that follows it yields the answers.
            role: which GEMM they are of.
            configs: the kernels.
            more: what else it is called with.

        Raises:
            MoetuneError: as :meth:`ask`.
        """
        with self._asking:
            self._make_ready()
            process, arguments = self._process, (role, configs, *more)
            assert process is not None
            ask = self._message(process, method, arguments, len(configs))
            answers = process.ask_each(ask, self._limits(method, arguments, self._tokens or 0))
        try:
            for _ in configs:
                with self._asking:
                    if self._process is not process:
                        raise _ended()
                    answer = self._heard(process, ask, lambda: next(answers))
                yield answer
                if answer.lost is not None:
                    return
        finally:
            with self._asking:
                self._break_off(answers)

    def _break_off(self, answers: Generator[Answer]) -> None:
        try:
            answers.close()
        except BaseException:  # Ctrl-C: nobody knows whether the process was told to stop
            self.end()
            raise

    def settle(self) -> None:
        """Wait until a question that was broken off is over, and let go of a process that ended in it or since.

        No candidate is to blame for that, least of all the one that is asked about next.

        Raises:
            RunError: new processes end one after the other.
        """
        with self._asking:
            process = self._process
            if process is None or not process.is_ready:
                return
            try:
                process.settle(self._limits("settle", (), self._tokens or 0))
            except ProcessEndedError as ended:
                self._lose(ended.failed)
            except BaseException:  # Ctrl-C, as in every question
                self.end()
                raise

    def end(self) -> None:
        """End the process that lives, at once; the next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def close(self) -> None:
        """End for good: also the question that another thread has put, which it hears of as a process that died."""
        self._is_closed = True
        while not self._asking.acquire(timeout=CLOSE_TICK_S):
            process = self._process
            if process is not None:
                process.kill()
        try:
            self.end()
        finally:
            self._asking.release()

    def _make_ready(self) -> None:
        """Start a process where there is none, and open the token count that was open in the last one."""
        self.settle()
        self._reopen()
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()
            self._reopen()  # what it asked may have been the end of the process

    def _reopen(self) -> None:
        while True:
            process = self._ready()
            if self._tokens is None or process.tokens == self._tokens:
                return
            answer = self._put(OPEN, self._tokens)
            if answer.lost is None and answer.value is not None:
                self._lose(answer.value)

    def _put(self, method: str, *arguments: Any) -> Answer:
        process = self._process
        assert process is not None
        ask = self._message(process, method, arguments)
        tokens = arguments[0] if method == OPEN else self._tokens or 0
        limit_s = self._limits(method, arguments, tokens)
        answer = self._heard(process, ask, lambda: process.ask(ask, limit_s))
        if method == OPEN and answer.lost is None:
            process.tokens = tokens if answer.value is None else None
        return answer

    def _message(self, process: GpuProcess, method: str, arguments: tuple[Any, ...], answers: int | None = None) -> Ask:
        """Return a question, with what the process does not know yet."""
        compiled = self.news.compiled(process.told)
        ceilings = None if process.knows_ceilings else self.news.ceilings
        learned = None if not compiled and ceilings is None else Learned(compiled=compiled, ceilings=ceilings)
        process.told += len(compiled)
        process.knows_ceilings = process.knows_ceilings or ceilings is not None
        return Ask(next(self._numbers), method, arguments, learned, answers)

    def _heard(self, process: GpuProcess, ask: Ask, answer_of: Callable[[], Answer]) -> Answer:
        """Return an answer, and let go of a process that gave its last one or none."""
        try:
            answer = answer_of()
        except ProcessEndedError as ended:
            answer = Answer(ask.number, None, ended.failed)
        except BaseException:  # Ctrl-C: what it is doing is nobody's business any more
            self.end()
            raise
        if answer.lost is not None:
            self._lose(answer.lost)
        elif ask.method != OPEN or answer.value is None:
            process.completed, self._fruitless = True, 0
        return answer

    def _new_process(self) -> GpuProcess:
        if self._is_closed:
            raise _ended()
        return GpuProcess(self._start_message.factory.partition(":")[0])

    def _ready(self) -> GpuProcess:
        """Return a process that has loaded the trials, a new one where there is none."""
        while True:
            process = self._process = self._process or self._new_process()
            if process.is_ready:
                return process
            ready = self._introduced(process)
            if isinstance(ready, Ready):
                self._confirm(ready.device)
            elif isinstance(ready, Refused) and not self._is_confirmed:
                self.end()
                raise ready.error
            else:
                self._lose(Failed(FailureKind.LAUNCH, str(ready.error)) if isinstance(ready, Refused) else ready)

    def _confirm(self, device: DeviceInfo) -> None:
        """Go on only with the device that kernels were compiled for."""
        if self._device not in (None, device):
            self.end()
            raise _changed(self._device, device) if self._is_confirmed else _described_otherwise(self._device, device)
        self._device, self._is_confirmed = device, True

    def _introduced(self, process: GpuProcess) -> Ready | Refused | Failed:
        ended = None if process.begun else self._begun(process)
        if ended is not None:
            return ended
        try:
            return process.ready(self._limits("start", (), 0))
        except ProcessEndedError as ended:
            return ended.failed
        except BaseException:
            self.end()
            raise

    def _begun(self, process: GpuProcess) -> Failed | None:
        """Tell it what to load; return why it cannot hear that."""
        try:
            process.begin(self._start_message, self._limits("start", (), 0))
        except ProcessEndedError as ended:
            return ended.failed
        except BaseException:
            self.end()
            raise
        return None

    def _lose(self, failed: Failed) -> None:
        """Let go of a process that is of no more use, and give up when that is all that new ones are."""
        self._fruitless += not self.has_answered
        self.end()
        if self._fruitless >= MAX_FRUITLESS:
            raise gone(failed)
        if self._fruitless:
            time.sleep(PAUSE_S)


def _ended() -> RunError:
    return RunError("the sweep ended, and with it the GPU's process")


def _changed(was: DeviceInfo, now: DeviceInfo) -> RunError:
    return RunError(
        f"the GPU changed while it was tuned, from {was.name} to {now.name}; every trial so far is kept: "
        "run `moetune doctor`, then the same command again"
    )


def _described_otherwise(driver: DeviceInfo, process: DeviceInfo) -> RunError:
    """Return the error for a device that the driver and torch describe differently: the compiles were for the wrong one."""
    said = driver.to_json()
    fields = [f"{name} {said[name]} and {value}" for name, value in process.to_json().items() if value != said[name]]
    return RunError(
        f"the driver and torch describe this GPU differently: {', '.join(fields)}; nothing was tuned: run "
        "`moetune doctor`, and the same command again where nothing else changes or limits the GPU"
    )


def gone(failed: Failed) -> RunError:
    """Return the error that ends a sweep whose GPU answers nothing any more, the last time as ``failed`` says."""
    return RunError(
        f"the GPU gives no more answers: {MAX_FRUITLESS} new processes in a row were of no use, the last time: "
        f"{failed.reason}; every trial so far is kept: run `moetune doctor`, then the same command again"
    )
