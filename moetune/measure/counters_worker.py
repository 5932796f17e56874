"""The process that runs under ncu: launch every kernel of every job once between cudaProfilerStart and -Stop.

Started as ``python -m moetune.measure.counters_worker WAIT_S JOBS LAUNCHES`` by :mod:`moetune.measure.counters_run`,
perhaps while a sweep still times its last token counts: it loads torch, Triton and our kernels, then waits up to WAIT_S
seconds for JOBS to appear, without CUDA and so without a trace on the GPU. Everything is launched once before it counts,
so that nothing compiles or loads inside a profiled range. Each profiled launch adds one JSON line to LAUNCHES, in the
order of ncu's rows; a job ends with ``done`` or ``failed``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
import torch.cuda.profiler
import triton

from moetune.measure.counters import CounterJob
from moetune.measure.counters_run import WAKE
from moetune.measure.faults import failure, is_sticky
from moetune.measure.inputs import ExpertWeights
from moetune.measure.kernel_jobs import PRELOAD
from moetune.measure.parts import SEED, layer_parts, resident_weights
from moetune.measure.router import Router, router_of
from moetune.measure.timer import finish

POLL_S = 0.01


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
        return self._weights

    def router(self, job: CounterJob) -> Router:
        """Return what routes the job's rows as they were when they were timed; a trace is read once."""
        key = (job.routing, job.shape, job.shape.experts)
        if self._router is None or key != self._router_key:
            self._router, self._router_key = router_of(job.routing, job.shape, SEED), key
        return self._router


def run(request: dict[str, Any], notes: IO[str]) -> None:
    """Run all jobs of ``request``, noting each profiled launch.

    Raises:
        Exception: the device is lost; the jobs that follow stay without a note.
    """
    device = torch.device("cuda", request["device_index"])
    torch.cuda.set_device(device)
    cache = _JobCache(device)
    for index, value in enumerate(request["jobs"]):
        try:
            _run_job(index, CounterJob.from_json(value), cache, notes)
        except Exception as error:
            _note(notes, {"job": index, "failed": failure(error).reason})
            if is_sticky(error):
                raise
        else:
            _note(notes, {"job": index, "done": True})


def _run_job(index: int, job: CounterJob, cache: _JobCache, notes: IO[str]) -> None:
    parts = layer_parts(job.shape, job.tokens, job.plan, cache.weights(job), cache.router(job))
    for _, call in parts.calls:
        call.launch()
    finish()
    with _profiled():
        for part, call in parts.calls:
            call.launch()
            _note(notes, {"job": index, "part": part.value, "kernel": call.kernel.__name__})


@contextlib.contextmanager
def _profiled() -> Iterator[None]:
    """Have ncu count the launches of the block, one by one: it waits for each."""
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


def _note(notes: IO[str], value: dict[str, Any]) -> None:
    notes.write(json.dumps(value) + "\n")
    notes.flush()  # a worker that dies later leaves what it did


def _load() -> None:
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


def _wait_for(jobs: Path, wait_s: float) -> bool:
    """Return whether the jobs came in time; the folder goes when nobody will write them any more."""
    deadline, awake = time.monotonic() + wait_s, False
    while not jobs.exists():
        if time.monotonic() > deadline or not jobs.parent.exists():
            return False
        wake = jobs.parent / WAKE
        if not awake and wake.exists():
            awake = True
            _start_cuda(json.loads(wake.read_text(encoding="utf-8"))["device_index"])
        time.sleep(POLL_S)
    return True


def _start_cuda(device_index: int) -> None:
    """Start CUDA and Triton's driver; where somebody else still has the GPU to himself, the first job tries again."""
    with contextlib.suppress(Exception):
        torch.cuda.set_device(device_index)
        torch.cuda.synchronize()
        _ = triton.runtime.driver.active  # loads it


def main() -> None:
    """Read the jobs' file, run them, write the launches' file."""
    wait_s, jobs, launches = float(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    _load()
    if _wait_for(jobs, wait_s):
        with launches.open("w", encoding="utf-8") as notes:
            run(json.loads(jobs.read_text(encoding="utf-8")), notes)


if __name__ == "__main__":
    main()
