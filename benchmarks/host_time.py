"""Where the host's time of a sweep goes: a whole sweep against a GPU that answers at once, with the real processes and pipes.

    python3 benchmarks/host_time.py --repeat 5

Needs no GPU. The tuner is the real one: search, store, table, events, a GPU process of its own. Only the trials in that
process are free (``free_trials.py``), and every kernel is compiled already. With ``--answer-ms 2`` each takes that long, as
on a GPU: then what the tuner does meanwhile costs nothing, and the last row is what the GPU waits for. Each part's time is its own alone: what a part
calls of another is that one's. Of several sweeps each part's shortest time is shown, since other programs only add.

The last lines are hashes of the table and of all trials in any order: equal ones mean that a change decided nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import inspect
import io
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command import started
from free_trials import DEVICE, FreeSettings

from moetune import tuning
from moetune.cli.options import SWEEP_TOKENS
from moetune.cli.sweep_display import PlainLines
from moetune.cli.sweep_progress import SweepProgress
from moetune.engine.backend import Kernel, LayerFigures
from moetune.engine.budget import Budget
from moetune.engine.count import CountTuner, Findings
from moetune.engine.memory import Memory
from moetune.engine.pace import Pace
from moetune.engine.request import SweepRequest
from moetune.engine.session import Session
from moetune.measure.gpu_respawn import HeadStart, RespawningGpu
from moetune.measure.isolated import IsolatedBackend
from moetune.models.resolve import ShapeRequest, resolve_shape
from moetune.outcome import Compiled, Failed
from moetune.store import Run, Store
from moetune.store.codec import dump, trial_to_json
from moetune.strategies import Guided
from moetune_kernels.device import DeviceInfo
from moetune_kernels.plan import LayerPlan

ASKING, SEARCH, STORE, TABLE, PACE, EVENTS, SPACE, REST = (
    "questions and answers",
    "search",
    "trial store",
    "table",
    "pace",
    "events and screen",
    "candidates",
    "rest",
)
ANSWERS = "answers"
PARTS: dict[str, tuple[tuple[type, tuple[str, ...]], ...]] = {
    ASKING: ((RespawningGpu, ("ask", "ask_each")),),
    SEARCH: ((Guided, ("__init__", "ask", "tell")), (Memory, ("terrain",)), (CountTuner, ("_remember",))),
    STORE: ((Run, ("record", "record_bound", "record_ceilings")),),
    TABLE: ((Findings, ("write",)),),
    PACE: ((Pace, ("allow", "quota", "survey_deadline", "probe_fits")),),
    EVENTS: ((PlainLines, ("__call__",)),),
    SPACE: ((Session, ("_choose",)),),
}


@dataclass
class Meter:
    """Seconds of each part without those of the parts that it calls."""

    seconds: Counter[str] = field(default_factory=Counter[str])
    calls: Counter[str] = field(default_factory=Counter[str])
    _inside: list[str] = field(default_factory=list[str])
    _since_s: float = 0.0

    @contextlib.contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count the block's time as that of ``part``."""
        self.calls[part] += 1
        self._turn()
        self._inside.append(part)
        try:
            yield
        finally:
            self._turn()
            self._inside.pop()

    def _turn(self) -> None:
        now_s = time.perf_counter()
        if self._inside:
            self.seconds[self._inside[-1]] += now_s - self._since_s
        self._since_s = now_s

    def watched(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time counted."""

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            with self.within(part):
                return function(*args, **named)

        @functools.wraps(function)
        def each(*args: Any, **named: Any) -> Generator[Any]:
            with contextlib.closing(function(*args, **named)) as found:
                while (one := within(lambda: next(found, each))) is not each:
                    yield one

        def within(step: Callable[[], Any]) -> Any:
            with self.within(part):
                return step()

        return each if inspect.isgeneratorfunction(function) else call


class ReadyCompiles:
    """Compiles at once, and knows no processes."""

    def __init__(self) -> None:
        self._queued: list[Kernel] = []

    def submit(self, kernels: Iterable[Kernel], device: DeviceInfo) -> None:
        """Take kernels."""
        del device
        self._queued += kernels

    def ended(self, wait_s: float = 0.0) -> Sequence[tuple[Kernel, Compiled | Failed]]:
        """Return a report for each."""
        del wait_s
        kernels, self._queued = self._queued, []
        return [(kernel, _report(kernel)) for kernel in kernels]

    def withdraw(self) -> Sequence[Kernel]:
        """Give back what was not asked for yet."""
        kernels, self._queued = self._queued, []
        return kernels

    def close(self) -> None:
        """End nothing."""


def _report(kernel: Kernel) -> Compiled:
    role, config = kernel
    registers = 64 + (7 * config.block_m + config.block_n + len(role.value)) % 128
    return Compiled(registers=registers, spills=0, smem_bytes=65_536, block_size=config.block_size)


class UncountedBackend(IsolatedBackend):
    """A live backend without hardware counters: they come from another program."""

    def prepare_counters(self) -> None:
        """Prepare nothing."""

    def counters(self, plans: dict[int, LayerPlan], limit_s: float = 120.0) -> dict[int, LayerFigures | Failed]:
        """Count nothing."""
        del plans, limit_s
        return {}

    def answered_s(self) -> float:
        """Return the seconds that answers took in the GPU process so far."""
        return self._gpu.ask("asked").value


@dataclass(frozen=True, slots=True)
class Swept:
    """One sweep: seconds and calls of each part, and hashes of what it wrote."""

    seconds: Counter[str]
    calls: Counter[str]
    table: str
    trials: str


def swept(model: str, tokens: tuple[int, ...], answer_s: float = 0.0) -> Swept:
    """Run one sweep in a folder of its own and return where its time went."""
    shape = resolve_shape(ShapeRequest(model)).shape
    with tempfile.TemporaryDirectory(prefix="moetune-host-") as name:
        folder = Path(name)
        request = SweepRequest(
            shape=shape,
            tokens=tokens,
            between=len(tokens) > 1,
            budget_s=240.0,
            out_dir=folder / "tables",
            store_path=folder / "trials.sqlite",
        )
        return _swept(request, answer_s)


def _swept(request: SweepRequest, answer_s: float) -> Swept:
    meter, settings = Meter(), FreeSettings(shape=request.shape, seed=request.seed, answer_s=answer_s)
    backend = UncountedBackend(
        settings, ReadyCompiles(), factory="free_trials:open_free", given=HeadStart(device=DEVICE)
    )
    with contextlib.closing(backend), _watching(meter):
        bed = tuning._gpu_bed(backend, request)  # noqa: SLF001  # as a sweep makes it
        backend.ceilings()  # the process is there: its start is measured elsewhere
        before_s = backend.answered_s()
        meter.seconds.clear()
        meter.calls.clear()
        with contextlib.redirect_stderr(io.StringIO()), meter.within(REST):
            result = tuning.run_on(bed, request, Budget(None), PlainLines(SweepProgress()))
        seconds, calls = meter.seconds.copy(), meter.calls.copy()
        seconds[ANSWERS] = backend.answered_s() - before_s
    with Store(result.store_path) as store:
        trials = [dump(trial_to_json(row.trial)) for row in store.rows(request.shape, DEVICE)]
    entries = dump({str(tokens): entry.to_json() for tokens, entry in result.table.entries.items()})
    return Swept(seconds, calls, _hash(entries), _hash("\n".join(sorted(trials))))


@contextlib.contextmanager
def _watching(meter: Meter) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for part, owners in PARTS.items():
            for owner, names in owners:
                for name in names:
                    function = getattr(owner, name)
                    stack.callback(setattr, owner, name, function)
                    setattr(owner, name, meter.watched(part, function))
        yield


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def in_new_process(model: str, tokens: tuple[int, ...], answer_s: float) -> Swept:
    """Run one sweep where nothing is remembered of another, and numpy has one thread, as in a sweep."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(swept, model, tokens, answer_s).result()


def main(arguments: Sequence[str]) -> int:
    """Sweep and print the times; 1 when two sweeps decided differently."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default=SWEEP_TOKENS, metavar="LIST")
    parser.add_argument("--answer-ms", type=float, default=0.0, metavar="MS", help="what a launch or a check takes")
    parser.add_argument("--repeat", type=int, default=3, metavar="N")
    options = parser.parse_args(arguments)
    tokens = tuple(map(int, options.tokens.split(",")))
    found = [in_new_process(options.model, tokens, options.answer_ms / 1e3) for _ in range(options.repeat)]
    print(table_of(found))
    decided = {(one.table, one.trials) for one in found}
    for table, trials in sorted(decided):
        print(f"table {table}, trials {trials}")
    return int(len(decided) != 1)


def table_of(found: Sequence[Swept]) -> str:
    """Return one line per part, its shortest time, calls and microseconds per call."""
    lines = [f"{'part':28s} {'ms':>8s} {'calls':>7s} {'us each':>8s}"]
    for part in (*PARTS, REST):
        least_s = min(one.seconds[part] for one in found)
        calls = found[0].calls[part]
        each = f"{1e6 * least_s / calls:8.0f}" if calls > 1 else ""
        lines.append(f"{part:28s} {1e3 * least_s:8.1f} {calls or '':>7} {each}".rstrip())
    totals_s = [sum(one.seconds[part] for part in (*PARTS, REST)) for one in found]
    left_s = min(total_s - one.seconds[ANSWERS] for total_s, one in zip(totals_s, found, strict=True))
    return "\n".join(
        [
            *lines,
            f"{'the shortest sweep':28s} {1e3 * min(totals_s):8.1f}",
            f"{'and without its answers':28s} {1e3 * left_s:8.1f}",
        ]
    )


if __name__ == "__main__":
    sys.exit(started(main))
