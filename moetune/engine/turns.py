"""Several GPUs, one thread each, one turn: engine code runs in the thread that has the turn, and lends it while a GPU works.

So the engine needs no other lock, and nothing that it shares changes under its hands except while it asks a backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import ParamSpec, Self, TypeVar, cast

from moetune.engine.backend import Backend, Ceilings, Entered, EntryTerms, Kernel, LayerFigures
from moetune.errors import MoetuneError
from moetune.outcome import Compiled, Failed, Outcome
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

LOOK_S = 0.02  # between two looks at the compilers, while a worker waits for a kernel and others have their turns
P = ParamSpec("P")
Answer = TypeVar("Answer")
_NO_MORE = object()


class StoppedError(Exception):
    """The sweep ends: whoever gets this gives up what it has in hand."""


class Turns:
    """The turn. ``with turns:`` waits for it and has it; a thread must not take it twice."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._is_stopped = False

    def __enter__(self) -> Self:
        self._condition.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._condition.release()

    def lend(self, ask: Callable[P, Answer], *args: P.args, **kwargs: P.kwargs) -> Answer:
        """Call ``ask`` while others have the turn, and return its answer once the turn is back.

        Raises:
            StoppedError: the sweep ended meanwhile; the answer may be that of a GPU that was taken away, and is dropped.
        """
        self._condition.release()
        try:
            return ask(*args, **kwargs)
        finally:
            self._condition.acquire()
            self.check()

    def wait(self, seconds: float | None = None) -> None:
        """Let others have the turn until one of them calls :meth:`notify`, or ``seconds`` have passed.

        Raises:
            StoppedError: the sweep ended.
        """
        self.check()
        self._condition.wait(seconds)
        self.check()

    def notify(self) -> None:
        """Wake those that wait."""
        self._condition.notify_all()

    def stop(self) -> None:
        """End the sweep: every thread that gets its turn from now on raises."""
        self._is_stopped = True
        with self:
            self.notify()

    def check(self) -> None:
        """Raise StoppedError where the sweep ended."""
        if self._is_stopped:
            raise StoppedError


class TurnTakingBackend:
    """A worker's GPU, asked while other workers have the turn. See :class:`moetune.engine.backend.Backend`.

    Args:
        gpu: the backend of one GPU.
        compiler: the backend whose compilers serve all GPUs; it is never waited for with the turn in hand.
        turns: the turn, which the caller of every method has.

    Attributes:
        lost: what ``gpu`` raised, which is then of no more use.
    """

    def __init__(self, gpu: Backend, compiler: Backend, turns: Turns) -> None:
        self._gpu, self._compiler, self._turns = gpu, compiler, turns
        self.lost: MoetuneError | None = None

    @property
    def name(self) -> str:
        """What the table's ``backend`` field says."""
        return self._gpu.name

    @property
    def device(self) -> DeviceInfo:
        """The GPU that answers."""
        return self._gpu.device

    @property
    def shape(self) -> MoEShape:
        """The layer that is tuned."""
        return self._gpu.shape

    def recorded(self, role: Role) -> Sequence[MoEKernelConfig] | None:
        """Return the only configs that can be answered, None where any can."""
        return self._gpu.recorded(role)

    def recorded_plans(self, tokens: int) -> Sequence[LayerPlan]:
        """Return the plans whose layer time is recorded."""
        return self._gpu.recorded_plans(tokens)

    # One compiler for all: asked with the turn in hand.

    def submit(self, kernels: Iterable[Kernel]) -> None:
        """Queue kernels to be compiled."""
        self._compiler.submit(kernels)

    def ended(self, wait_s: float = 0.0) -> Sequence[tuple[Kernel, Compiled | Failed]]:
        """Return the kernels that ended since the last call; another worker may have taken in the awaited one meanwhile."""
        found = self._compiler.ended(0.0)
        if not found and wait_s > 0:
            self._turns.wait(min(wait_s, LOOK_S))
            found = self._compiler.ended(0.0)
        return found

    def withdraw(self) -> Sequence[Kernel]:
        """Take back the kernels that no compiler has begun."""
        return self._compiler.withdraw()

    # The GPU: asked while others have the turn.

    def ceilings(self) -> Ceilings:
        """Measure the device's limits."""
        return self._ask(self._gpu.ceilings)

    def open(self, tokens: int) -> Failed | None:
        """Make inputs and the reference for one token count."""
        return self._ask(self._gpu.open, tokens)

    def bound_us(self) -> float:
        """Return the physical bound of the open token count."""
        return self._ask(self._gpu.bound_us)

    def enter_kernels(self, role: Role, configs: Sequence[MoEKernelConfig], terms: EntryTerms) -> Generator[Entered]:
        """Let kernels into a race one after the other."""
        return self._each(self._gpu.enter_kernels(role, configs, terms))

    def verify_kernels(self, role: Role, configs: Sequence[MoEKernelConfig]) -> Generator[Failed | None]:
        """Compare each with the float32 reference."""
        return self._each(self._gpu.verify_kernels(role, configs))

    def time_kernels(self, role: Role, configs: Sequence[MoEKernelConfig], samples: int) -> Generator[Outcome]:
        """Time each."""
        return self._each(self._gpu.time_kernels(role, configs, samples))

    def time_and_recheck_kernels(
        self, role: Role, configs: Sequence[MoEKernelConfig], samples: int
    ) -> Generator[Outcome]:
        """Time each, and compare it again right after."""
        return self._each(self._gpu.time_and_recheck_kernels(role, configs, samples))

    def time_routing(self, block_m: int) -> Outcome:
        """Time route and permute."""
        return self._ask(self._gpu.time_routing, block_m)

    def time_combine(self) -> Outcome:
        """Time the combine kernel."""
        return self._ask(self._gpu.time_combine)

    def time_layers(self, plans: Sequence[LayerPlan], rounds: int) -> Sequence[Outcome]:
        """Time whole layers, interleaved."""
        return self._ask(self._gpu.time_layers, plans, rounds)

    def time_rerouted(self, plans: Sequence[LayerPlan], rounds: int) -> Sequence[Sequence[Outcome]]:
        """Time whole layers under other routings."""
        return self._ask(self._gpu.time_rerouted, plans, rounds)

    def verify_layer(self, plan: LayerPlan) -> Failed | None:
        """Compare the whole layer with the reference."""
        return self._ask(self._gpu.verify_layer, plan)

    def prepare_counters(self) -> None:
        """Get ready what ``counters`` will need: a start of processes that is not waited for."""
        self._gpu.prepare_counters()

    def counters(self, plans: dict[int, LayerPlan], limit_s: float = 120.0) -> dict[int, LayerFigures | Failed]:
        """Read hardware counters."""
        return self._ask(self._gpu.counters, plans, limit_s)

    def close(self) -> None:
        """Free what the GPU's run holds; a question that another thread has put ends with it."""
        self._gpu.close()

    def _each(self, ends: Generator[Answer]) -> Generator[Answer]:
        """Wait for each of several ends while others have the turn."""
        with closing(ends):
            while (one := self._ask(lambda: next(ends, _NO_MORE))) is not _NO_MORE:
                yield cast("Answer", one)

    def _ask(self, method: Callable[P, Answer], *args: P.args, **kwargs: P.kwargs) -> Answer:
        try:
            return self._turns.lend(method, *args, **kwargs)
        except MoetuneError as error:
            self.lost = error
            raise
