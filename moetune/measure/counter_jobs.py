"""What a process that counts launches does, whoever counts them: load, wait, run every kernel of every job, note it.

Started as ``python -m moetune.measure.<worker> WAIT_S JOBS LAUNCHES …`` by :mod:`moetune.measure.counters_run`, perhaps
while a sweep still times its last token counts: it loads torch, Triton and our kernels, then waits up to WAIT_S seconds
for JOBS to appear, without CUDA and so without a trace on the GPU. Everything is launched once before it counts, so that
nothing compiles or loads inside a profiled range. Each profiled launch adds one JSON line to LAUNCHES, in the order of
the launches; a job ends with ``done`` or ``failed``; ``refused`` says that nothing can be counted here; ``seconds`` is
how long each phase took.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import torch
import triton

from moetune.measure.counter_rights import CountersRefusedError
from moetune.measure.counters import CounterJob
from moetune.measure.counters_run import WAKE
from moetune.measure.faults import failure, is_sticky
from moetune.measure.inputs import ExpertWeights
from moetune.measure.kernel_jobs import PRELOAD
from moetune.measure.parts import SEED, Part, layer_parts, resident_weights
from moetune.measure.router import Router, router_of
from moetune.measure.timer import finish
from moetune_kernels.kernel_call import KernelCall

POLL_S = 0.01

Calls = Sequence[tuple[Part, KernelCall]]
Tell = Callable[[Part, KernelCall, Mapping[str, float] | None], None]


class Counting(Protocol):
    """Who counts, as seen from inside the process that launches."""

    def load(self) -> None:
        """Load and check all that needs no GPU. Raises CountersRefusedError: nothing can be counted here."""
        ...

    def begin(self) -> None:
        """Get ready on the current CUDA device; called again where it failed. Raises CountersRefusedError."""
        ...

    def count(self, calls: Calls, tell: Tell) -> None:
        """Launch each call once, counted, and tell of it, with its values where they are known now.

        Raises:
            CountersRefusedError: nothing can be counted here.
        """
        ...

    def spent(self) -> Mapping[str, float]:
        """Return seconds by what they were spent on, beyond the phases that are the same for all."""
        ...


class Phases:
    """Seconds by phase, summed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's seconds to a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin


class _JobCache:
    """Holds the weights and the router of one shape: jobs of a shape come one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._key: Any = None
        self._weights: ExpertWeights | None = None
        self._router_key: Any = None
        self._router: Router | None = None

    def weights(self, job: CounterJob) -> ExpertWeights:
        """Return the job's weights, made when the last job's do not fit it."""
        key = (job.shape, job.resident_experts)
        if self._weights is None or key != self._key:
            self._weights = None
            torch.cuda.empty_cache()
            self._weights, self._key = resident_weights(job.shape, job.resident_experts, self._device), key
            finish()
        return self._weights

    def router(self, job: CounterJob) -> Router:
        """Return what routes the job's rows as they were when they were timed; a trace is read once."""
        key = (job.routing, job.shape, job.shape.experts)
        if self._router is None or key != self._router_key:
            self._router, self._router_key = router_of(job.routing, job.shape, SEED), key
        return self._router


def serve(wait_s: float, jobs: Path, launches: Path, counting: Counting) -> None:
    """Load, wait for the jobs' file, run them, write the launches' file."""
    phases = Phases()
    try:
        with phases.phase("load"):
            load()
            counting.load()
        if wait_for(jobs, wait_s, counting):
            with launches.open("w", encoding="utf-8") as notes:
                run(json.loads(jobs.read_text(encoding="utf-8")), notes, counting, phases)
                note(notes, {"seconds": phases.seconds | dict(counting.spent())})
    except CountersRefusedError as error:
        with launches.open("a", encoding="utf-8") as notes:
            note(notes, {"refused": str(error)})


def run(request: dict[str, Any], notes: IO[str], counting: Counting, phases: Phases) -> None:
    """Run all jobs of ``request``, noting each profiled launch.

    Raises:
        CountersRefusedError: nothing can be counted here.
        Exception: the device is lost; the jobs that follow stay without a note.
    """
    with phases.phase("start CUDA"):
        device = torch.device("cuda", request["device_index"])
        torch.cuda.set_device(device)
        torch.cuda.synchronize()
    with phases.phase("get ready"):
        counting.begin()
    cache = _JobCache(device)
    for index, value in enumerate(request["jobs"]):
        try:
            _run_job(index, CounterJob.from_json(value), cache, notes, counting, phases)
        except CountersRefusedError:
            raise
        except Exception as error:
            note(notes, {"job": index, "failed": failure(error).reason})
            if is_sticky(error):
                raise
        else:
            note(notes, {"job": index, "done": True})


def _run_job(index: int, job: CounterJob, cache: _JobCache, notes: IO[str], counting: Counting, phases: Phases) -> None:
    def tell(part: Part, call: KernelCall, values: Mapping[str, float] | None) -> None:
        launch = {"job": index, "part": part.value, "kernel": call.kernel.__name__}
        note(notes, launch if values is None else launch | {"values": values})

    with phases.phase("weights"):
        weights = cache.weights(job)
    with phases.phase("first launches"):
        parts = layer_parts(job.shape, job.tokens, job.plan, weights, cache.router(job))
        for _, call in parts.calls:
            call.launch()
        finish()
    with phases.phase("profiled launches"):
        counting.count(parts.calls, tell)


def note(notes: IO[str], value: Mapping[str, Any]) -> None:
    """Write one line."""
    notes.write(json.dumps(value) + "\n")
    notes.flush()  # a worker that dies later leaves what it did


def load() -> None:
    """Load what launches will need and work out what Triton keys its cache with, all that needs no GPU."""
    for module in PRELOAD:
        importlib.import_module(module)
    kernels = [
        value
        for name, module in list(sys.modules.items())
        if name.startswith("moetune_kernels.")
        for value in vars(module).values()
        if isinstance(value, triton.JITFunction)
    ]
    for kernel in kernels:
        _ = kernel.cache_key  # reads and hashes the sources of the kernel, once
    hash_of_triton = getattr(triton.runtime.cache, "triton_key", None)  # no part of its interface, and cached
    if hash_of_triton is not None:
        hash_of_triton()


def wait_for(jobs: Path, wait_s: float, counting: Counting) -> bool:
    """Return whether the jobs came in time; the folder goes when nobody will write them any more."""
    deadline, awake = time.monotonic() + wait_s, False
    while not jobs.exists():
        if time.monotonic() > deadline or not jobs.parent.exists():
            return False
        wake = jobs.parent / WAKE
        if not awake and wake.exists():
            awake = True
            start_cuda(json.loads(wake.read_text(encoding="utf-8"))["device_index"], counting)
        time.sleep(POLL_S)
    return True


def start_cuda(device_index: int, counting: Counting) -> None:
    """Start CUDA, Triton's driver and who counts; where somebody still has the GPU to himself, the first job tries again."""
    with contextlib.suppress(Exception):
        torch.cuda.set_device(device_index)
        torch.cuda.synchronize()
        _ = triton.runtime.driver.active  # loads it
        counting.begin()
