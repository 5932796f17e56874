"""The process that owns the GPU: loads the trials of a layer and answers one question after the other.

A question about several kernels has an answer for each. They are sent as they come and not waited for, so that the next
kernel is launched while the tuner writes the last one down.

Started by :class:`moetune.measure.gpu_process.GpuProcess` as ``python -m moetune.measure.gpu_worker QUESTIONS ANSWERS
PARENT PRELOAD``: two file descriptors, the tuner's process id, and a module that is imported before the first message,
which takes seconds. Importing must not touch the GPU: another sweep may have it until that message. Standard output and
error are the tuner's log file, so that whatever CUDA, Triton or a compiler prints stays out of the answers. It ends when
the tuner does, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from moetune.engine.backend import Ceilings
from moetune.errors import MoetuneError, RunError
from moetune.measure.compile_worker import one_line
from moetune.measure.faults import failure
from moetune.measure.gpu_messages import HANDSHAKE, Answer, Ask, Inbox, Ready, Refused, Start, Stop, Stopped, packed
from moetune.outcome import Compiled, Failed
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo

LOST = 3  # the exit code of a process whose device is lost, after it said so
_READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_OOM_SCORE = 500  # of 1000: where memory runs out, this process goes and not the tuner


class Trials(Protocol):
    """What a factory returns: these, and every method that is asked for."""

    @property
    def device(self) -> DeviceInfo:
        """The device that answers."""
        ...

    @property
    def lost(self) -> Failed | None:
        """The trial that lost the device, None while it answers."""
        ...

    def learn(self, compiled: Mapping[tuple[Role, MoEKernelConfig], Compiled], ceilings: Ceilings | None) -> None:
        """Take over what others found out."""
        ...


def serve(questions: int, answers: int, preload: str) -> None:
    """Import, then load the trials and answer until the pipe of questions closes."""
    why_not = _preload(preload)
    inbox = Inbox()
    start = _next(questions, inbox)
    if not isinstance(start, Start):
        return
    try:
        trials = _load(start, why_not)
    except Exception as error:  # noqa: BLE001  # whatever it is, the tuner says it
        _send(answers, packed(Refused(error if isinstance(error, MoetuneError) else _no_start(error))))
        return
    _send(answers, packed(Ready(device=trials.device)))
    while (message := _next(questions, inbox)) is not None:
        if isinstance(message, Stop):
            continue  # all answers had been given already
        if not isinstance(message, Ask):
            return
        for lost, data in _answers(trials, message, lambda: _is_stopped(questions, inbox)):
            _send(answers, data)
            if lost is not None:
                os._exit(LOST)  # a lost CUDA context can hang or abort in the destructors of a normal exit


def _preload(module: str) -> Exception | None:
    """Import it; return what it raised, because a second attempt at half an import says something else.

    What an import makes stays. Looking through it for garbage, 400 times in all, is an eighth of the time that torch's
    takes, and a tenth of a second for each later look in the middle of a sweep: so nobody looks.
    """
    gc.disable()
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  # said once somebody listens
        return error
    finally:
        gc.freeze()
        gc.enable()
    return None


def _load(start: Start, why_not: Exception | None) -> Trials:
    if start.handshake != HANDSHAKE:
        raise RunError(
            f"moetune was changed while it ran: the tuner is {start.handshake}, its GPU process {HANDSHAKE}; "
            "run the same command again"
        )
    if why_not is not None:
        raise why_not
    module, _, name = start.factory.partition(":")
    return getattr(importlib.import_module(module), name)(start.settings)


def _no_start(error: Exception) -> RunError:
    return RunError(f"the GPU process could not start: {one_line(error)}; run `moetune doctor`")


def _answers(trials: Trials, ask: Ask, is_stopped: Callable[[], bool]) -> Iterator[tuple[Failed | None, bytes]]:
    """Yield the answers to one question as they are sent, each with what lost the device: the last one then."""

    def begun() -> Any:
        if ask.learned is not None:
            trials.learn(ask.learned.compiled, ask.learned.ceilings)
        return getattr(trials, ask.method)(*ask.arguments)

    if ask.answers is None:
        yield _answered(trials, ask.number, begun)
        return

    def each() -> Iterator[Any]:
        yield from begun()

    values = each()
    for place in range(ask.answers):
        if place and is_stopped():
            yield None, packed(Stopped(ask.number))
            return
        yield _answered(trials, ask.number, lambda: next(values))


def _answered(trials: Trials, number: int, answer: Callable[[], Any]) -> tuple[Failed | None, bytes]:
    """Ask the trials; whatever they raise is the end of this process, because nobody knows what state it left."""
    try:
        value = answer()
        return trials.lost, packed(Answer(number, value, trials.lost))
    except Exception as error:  # noqa: BLE001  # a kernel may fail in any way, and the sweep must go on
        lost = trials.lost or failure(error)
        return lost, packed(Answer(number, None, lost))


def _is_stopped(questions: int, inbox: Inbox) -> bool:
    """Whether the tuner says that it wants no more answers, or went away; waits for nothing."""
    if not select.select([questions], [], [], 0)[0]:
        return False
    message = _next(questions, inbox)
    assert message is None or isinstance(message, Stop), "a question came before the last one had its answers"
    return True


def _next(questions: int, inbox: Inbox) -> Any | None:
    """Return the next message; None when the tuner closed the pipe."""
    while (message := inbox.take()) is None:
        data = os.read(questions, _READ_BYTES)
        if not data:
            return None
        inbox.add(data)
    return message


def _send(answers: int, message: bytes) -> None:
    data = memoryview(message)
    while data:
        data = data[os.write(answers, data) :]


def _end_with(parent: int) -> None:
    """Be killed when the tuner ends, even by a SIGKILL in the middle of a launch that never returns."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        os._exit(0)


def _prepare(parent: int) -> None:
    _end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tuner's business: it kills us
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # nobody waits for a core dump of mapped GPU memory
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE), encoding="ascii")


def main() -> None:
    """Serve one tuner."""
    questions, answers, parent = map(int, sys.argv[1:4])
    preload = sys.argv[4]
    _prepare(parent)
    for pipe in (questions, answers):
        os.set_inheritable(pipe, False)  # a compiler that we start must not keep them open
    with contextlib.suppress(BrokenPipeError):  # the tuner went away
        serve(questions, answers, preload)
    os._exit(0)


if __name__ == "__main__":
    main()
