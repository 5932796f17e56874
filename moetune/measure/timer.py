"""Time kernels and layers in microseconds by CUDA events, behind a cold and clean L2.

Cold means: at least twice the L2 written, then a different buffer of at least twice the L2 read. (Layers and kernels of 12
to 2,400 us take the same time after 64, 128, 256 and 512 MiB written, H200: reports/2026-12-01-h200-sweep-times.md.) The
write alone leaves dirty lines, whose write-back the timed kernel would pay for (7 us on a 75 MB read, H200). The flush is queued first, so that the
launch is queued long before the GPU gets to it: host time is not in the figure.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from moetune.outcome import Sample, summarize

FLUSH_L2S = 2  # written, and read
MIN_FLUSH_WRITE_BYTES = 128 << 20
MIN_FLUSH_READ_BYTES = 64 << 20
WAIT_LIMIT_S = 30.0  # the slowest layer takes tens of milliseconds; a kernel that deadlocks never ends
_SPIN_S = 0.02  # most rounds of one kernel end before; a sleep ends 0.14 ms too late on average
_SLEEP_S = 0.0002

Launch = Callable[[], object]


class DeviceHungError(Exception):
    """The GPU did not finish in time; nothing more can be run in this process."""


def round_order(count: int, turn: int) -> list[int]:
    """Return the order of ``count`` candidates in round ``turn``: forward, then reverse, starting one further each pair.

    A clock that drifts steadily then falls on all alike.

    >>> round_order(3, 0), round_order(3, 1), round_order(3, 2)
    ([0, 1, 2], [2, 1, 0], [1, 2, 0])
    """
    start = (turn // 2) % count
    forward = [*range(start, count), *range(start)]
    return forward if turn % 2 == 0 else forward[::-1]


class Timer:
    """Times launches on one CUDA device; holds the flush buffers (each of twice the L2).

    Args:
        device: the CUDA device; must be current when a method is called.
        l2_bytes: its L2.
    """

    def __init__(self, device: torch.device, l2_bytes: int) -> None:
        write_bytes = max(FLUSH_L2S * l2_bytes, MIN_FLUSH_WRITE_BYTES)
        read_bytes = max(FLUSH_L2S * l2_bytes, MIN_FLUSH_READ_BYTES)
        self._written = torch.empty(write_bytes // 4, dtype=torch.float32, device=device)
        self._read = torch.zeros(read_bytes // 4, dtype=torch.float32, device=device)
        self._sum = torch.empty((), dtype=torch.float32, device=device)
        self._events: list[torch.cuda.Event] = []
        self._busy_ms = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds from the first flush to the end of the last launch, over all rounds so far, by the GPU's clock."""
        return self._busy_ms / 1e3

    def cool(self) -> None:
        """Queue the flush: afterwards the L2 holds clean lines that no kernel needs."""
        self._written.zero_()
        torch.sum(self._read, dim=0, out=self._sum)

    def once(self, launch: Launch) -> float:
        """Return the time of one launch in microseconds, without a warm-up."""
        (times,) = self.rounds([launch], 1)
        return times[0]

    def sample(self, launch: Launch, samples: int) -> Sample:
        """Time ``samples`` launches after one warm-up launch."""
        launch()
        (times,) = self.rounds([launch], samples)
        return summarize(times)

    def rounds(
        self,
        launches: Sequence[Launch],
        count: int,
        meanwhile: Callable[[], object] | None = None,
        after_last: Callable[[int], object] = lambda _: None,
    ) -> list[list[float]]:
        """Time every launch ``count`` times, interleaved, forward and reverse by turns.

        Args:
            launches: what to time.
            count: samples of each.
            meanwhile: called when all is queued, and again and again until the GPU is done.
            after_last: called with the place of each launch behind its last sample, before the next launch is queued.

        Returns:
            One list of microseconds per launch.

        Raises:
            DeviceHungError: the GPU did not finish within the limit.
        """
        stream, events = torch.cuda.current_stream(), self._some_events(2 * count * len(launches) + 2)
        begin, last = next(events), next(events)
        marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in launches]
        begin.record(stream)
        for turn in range(count):
            for index in round_order(len(launches), turn):
                start, end = next(events), next(events)
                self.cool()
                start.record(stream)
                launches[index]()
                end.record(stream)
                marks[index].append((start, end))
                if turn == count - 1:
                    after_last(index)
        last.record(stream)
        wait(last, meanwhile=meanwhile)
        self._busy_ms += begin.elapsed_time(last)
        return [[start.elapsed_time(end) * 1e3 for start, end in pairs] for pairs in marks]

    def _some_events(self, count: int) -> Iterator[torch.cuda.Event]:
        """Return events that nothing waits for any more; each is made once and recorded again and again."""
        missing = count - len(self._events)
        self._events += [torch.cuda.Event(enable_timing=True) for _ in range(missing)]
        return iter(self._events)


def wait(event: torch.cuda.Event, limit_s: float = WAIT_LIMIT_S, meanwhile: Callable[[], object] | None = None) -> None:
    """Wait for a recorded event, but not for ever; ``meanwhile`` is called at least once.

    Raises:
        DeviceHungError: the event has not come after ``limit_s``.
    """
    begin = time.monotonic()
    if meanwhile is not None:
        meanwhile()
    while not event.query():
        if meanwhile is not None:
            meanwhile()
        waited = time.monotonic() - begin
        if waited > limit_s:
            raise DeviceHungError(f"the GPU did not finish within {limit_s:g} s")
        if waited > _SPIN_S:
            time.sleep(_SLEEP_S)


def finish(limit_s: float = WAIT_LIMIT_S) -> None:
    """Wait for everything queued on the current stream, but not for ever.

    Raises:
        DeviceHungError: the GPU has not finished after ``limit_s``.
    """
    event = torch.cuda.Event()
    event.record()
    wait(event, limit_s)


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """One captured layer: call it to replay it.

    Args:
        replay: replays the graph.
        output: what was returned during the capture. It holds what a replay wrote until another graph of the pool is
            replayed: while this reference lives no graph captured later gets its memory, but one captured earlier may
            have used it for tensors that it was done with.
        free: frees the graph; its memory goes back to the pool when ``output`` is gone too.
    """

    replay: Launch
    output: Any
    free: Launch = lambda: None

    def __call__(self) -> None:
        """Queue one replay."""
        self.replay()


@dataclass(slots=True)
class CapturedLayers:
    """CUDA graphs that share one memory pool, because only one runs at a time.

    Args:
        stream: the stream to capture on; keep one, because torch caches memory per stream.
    """

    stream: torch.cuda.Stream
    pool: Any = field(default_factory=torch.cuda.graph_pool_handle)  # torch names its type in private
    replays: list[Replay] = field(default_factory=list[Replay])

    def capture(self, run: Launch) -> Replay:
        """Run once eagerly, then capture ``run`` and return its replay, which keeps what ``run`` returned.

        Other tensors that ``run`` makes are gone afterwards.
        """
        run()  # loads the kernels: a module cannot be loaded while a capture runs
        finish()
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), no_garbage_collection():
            output = _capture(graph, self.pool, run)
        torch.cuda.current_stream().wait_stream(self.stream)
        replay = Replay(graph.replay, output, graph.reset)
        self.replays.append(replay)
        return replay

    def drop(self, replay: Replay) -> None:
        """Free one graph; another must live on, because torch cannot take up a pool again that has none."""
        assert len(self.replays) > 1, "close the last graph of a pool with it"
        self.replays.remove(replay)
        replay.free()

    def close(self) -> None:
        """Free the graphs and their memory."""
        for replay in self.replays:
            replay.free()
        self.replays.clear()


def _capture(graph: torch.cuda.CUDAGraph, pool: Any, run: Launch) -> object:
    graph.capture_begin(pool=pool)
    try:
        output = run()
    except BaseException:
        with suppress(Exception):  # ending a broken capture fails too; what broke it is the error to report
            graph.capture_end()
        raise
    graph.capture_end()
    return output


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python from freeing a GPU object in the middle of a capture, which would break it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
