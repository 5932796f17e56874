"""Who tunes: one bench in the caller's thread, or one bench per GPU in threads of their own that share the work.

Work is stolen rather than dealt: whoever is free takes the next item, so that a slow GPU, or one with a large token
count in hand, keeps nobody waiting.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from moetune.engine.backend import Backend, Ceilings
from moetune.engine.bench import Bench
from moetune.engine.events import Warned
from moetune.engine.turns import StoppedError, Turns, TurnTakingBackend
from moetune.errors import MoetuneError

MOST_LOSSES = 2  # GPUs that one item may take down: no third one is given it
PATIENCE_S = 10.0  # for threads whose GPUs were taken away; they are daemons, and nobody waits longer for them

T = TypeVar("T")


class NotHereError(Exception):
    """This GPU cannot do the item that its worker has in hand, for want of memory as a rule; another one may."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


Waiting = Callable[[], Sequence[T]]
Work = Callable[[Bench, T, Waiting[T]], None]
GiveUp = Callable[[T, str], None]


class Workers(Protocol):
    """One or several benches. A context: what still runs when it is left by an error is stopped."""

    @property
    def count(self) -> int:
        """How many have a GPU that answers."""
        ...

    @property
    def first(self) -> Bench:
        """The first of these, for what is done once."""
        ...

    def ceilings(self) -> Ceilings:
        """Return what the first GPU reaches."""
        ...

    def each(self, items: Iterable[T], work: Work[T], give_up: GiveUp[T]) -> None:
        """Have ``work`` done on every item, each by one worker, and return when all are done.

        Args:
            items: in the order in which they are begun.
            work: called with the worker's bench, the item, and what returns the items that nobody has begun; raises
                NotHereError where another GPU may do better.
            give_up: called with an item that no GPU could do or that took GPUs down, and the last reason.

        Raises:
            MoetuneError: no worker is left; or whatever else ``work`` raised, in whichever thread.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


def workers_of(bench: Bench, others: Sequence[Backend], names: Sequence[str]) -> Workers:
    """Return the workers for the GPU of ``bench`` and for ``others``, which share what it knows.

    Args:
        bench: the first worker's.
        others: backends of further GPUs of the same model.
        names: what to call the GPUs, the first one's first.
    """
    return Crew(bench, others, names) if others else Alone(bench)


@dataclass(frozen=True, slots=True)
class Alone:
    """One bench: everything happens in the caller's thread, in order."""

    bench: Bench

    @property
    def count(self) -> int:
        """One."""
        return 1

    @property
    def first(self) -> Bench:
        """The only one."""
        return self.bench

    def ceilings(self) -> Ceilings:
        """Return what the GPU reaches."""
        return self.bench.backend.ceilings()

    def each(self, items: Iterable[T], work: Work[T], give_up: GiveUp[T]) -> None:
        """Do ``work`` on one item after the other; an error of the GPU is the end."""
        left = deque(items)
        while left:
            item = left.popleft()
            try:
                work(self.bench, item, lambda: list(left))
            except NotHereError as error:
                give_up(item, error.reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass(eq=False)
class _Round:
    """One call of :meth:`Crew.each`: what is left of it, how much is in hand, and why it cannot end well.

    ``losses`` counts the GPUs that an item took down, ``refused`` says which workers could not do it, and why.
    """

    left: deque[Any]
    work: Work[Any]
    give_up: GiveUp[Any]
    in_hand: int = 0
    losses: Counter[Any] = field(default_factory=Counter[Any])
    refused: dict[Any, dict[_Worker, str]] = field(default_factory=dict[Any, "dict[_Worker, str]"])
    failure: BaseException | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def next_for(self, worker: _Worker) -> Any:
        """Return the first item that is left and that the worker has not refused; None where there is none."""
        return next((item for item in self.left if worker not in self.refused.get(item, ())), None)

    def settle(self, alive: Sequence[_Worker]) -> None:
        """Give up what all that are left have refused, and end where nothing is left to do."""
        for item in [item for item in self.left if all(one in self.refused.get(item, ()) for one in alive)]:
            self.left.remove(item)
            self.give_up(item, [*self.refused[item].values()][-1])
        if not self.left and not self.in_hand:
            self.ended.set()


@dataclass(eq=False)
class _Worker:
    """One GPU: its bench where turns are taken, and the same in the main thread between two rounds."""

    name: str
    bench: Bench
    backend: TurnTakingBackend
    between: Bench
    thread: threading.Thread | None = None


class Crew:
    """One thread per GPU. The main thread only waits, so that Ctrl-C finds it outside all of the engine's work.

    The threads live as long as the crew: a GPU process does not outlive the thread that started it.
    """

    def __init__(self, bench: Bench, others: Sequence[Backend], names: Sequence[str]) -> None:
        self._turns, self._round, self._is_over = Turns(), None, False
        self._emit, self._alive = bench.emit, list[_Worker]()
        backends = [bench.backend, *others]
        for place, backend in enumerate(backends):
            taking = TurnTakingBackend(backend, bench.backend, self._turns)
            name = names[place] if place < len(names) else f"GPU {place + 1} of {len(backends)}"
            between = bench.beside(backend) if place else bench
            self._alive.append(_Worker(name, bench.beside(taking), taking, between))
        self._all = tuple(self._alive)

    _round: _Round | None

    @property
    def count(self) -> int:
        """How many have a GPU that answers."""
        return len(self._alive)

    @property
    def first(self) -> Bench:
        """The first of these, for the main thread between two rounds."""
        return self._alive[0].between

    def ceilings(self) -> Ceilings:
        """Return what the first GPU reaches that answers."""
        while True:
            worker = self._alive[0]
            try:
                return worker.between.backend.ceilings()
            except MoetuneError as error:
                if self.count == 1:
                    raise
                self._leave(worker, error)

    def each(self, items: Iterable[T], work: Work[T], give_up: GiveUp[T]) -> None:
        """Let whoever is free take the next item, until all are done."""
        current = _Round(deque(items), work, give_up)
        with self._turns:
            current.settle(self._alive)
            self._round = current
            self._turns.notify()
        for worker in self._alive.copy():
            if worker.thread is None:
                worker.thread = threading.Thread(target=self._serve, args=(worker,), name=worker.name, daemon=True)
                worker.thread.start()
        current.ended.wait()
        if current.failure is not None:
            raise current.failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            with self._turns:
                self._is_over = True
                self._turns.notify()
        else:
            self._turns.stop()
            for worker in self._all:
                if worker.thread is not None:
                    worker.backend.close()  # ends the question that its thread has put
        deadline_s = time.monotonic() + PATIENCE_S
        for worker in self._all:
            if worker.thread is not None:
                worker.thread.join(max(deadline_s - time.monotonic(), 0.0))

    # in a worker's thread

    def _serve(self, worker: _Worker) -> None:
        try:
            with self._turns:
                while worker in self._alive and (current := self._next_round(worker)) is not None:
                    self._take(worker, current)
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001  # whatever it is, the main thread raises it
            self._fail(error)

    def _next_round(self, worker: _Worker) -> _Round | None:
        """Wait for something to do; None when there will be nothing more. What another has in hand may come back."""
        while not self._is_over:
            self._turns.check()
            current = self._round
            if current is not None and current.failure is None and current.next_for(worker) is not None:
                return current
            self._turns.wait()
        return None

    def _take(self, worker: _Worker, current: _Round) -> None:
        """Do the next item; where the worker cannot, or loses its GPU, another one will."""
        item = current.next_for(worker)
        current.left.remove(item)
        current.in_hand += 1
        try:
            current.work(worker.bench, item, lambda: list(current.left))
        except NotHereError as error:
            current.refused.setdefault(item, {})[worker] = error.reason
            current.left.appendleft(item)
        except MoetuneError as error:
            if worker.backend.lost is not error:
                raise
            self._lose(worker, current, item, error)
        current.in_hand -= 1
        current.settle(self._alive)
        self._turns.notify()

    def _lose(self, worker: _Worker, current: _Round, item: Any, error: MoetuneError) -> None:
        """Go on without a GPU: what its worker had in hand is the next item of another."""
        if self.count == 1:
            raise error
        self._leave(worker, error)
        current.losses[item] += 1
        if current.losses[item] < MOST_LOSSES:
            current.left.appendleft(item)
        else:
            current.give_up(item, str(error))

    def _leave(self, worker: _Worker, error: MoetuneError) -> None:
        self._alive.remove(worker)
        self._emit(Warned(f"{worker.name} leaves the sweep, {self.count} of {len(self._all)} go on: {error}"))

    def _fail(self, error: BaseException) -> None:
        current = self._round
        assert current is not None
        current.failure = current.failure or error
        current.ended.set()
