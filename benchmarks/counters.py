"""How long a sweep's counters take by CUPTI and by ncu, phase by phase, and how far the two agree.

    python3 benchmarks/counters.py tuned_configs/nvidia_h200/e128_h2048_i768_k8_bf16.json

Counts every kernel of each of the table's plans, as the end of a sweep does. Each way runs twice: `cold`, from the start of
its process, and `ahead`, with a process that has loaded already and waits, from the moment that it may start CUDA. One JSON
line for each run, and one for how CUPTI's values compare with ncu's, launch by launch. `seconds` is wall time; `phases` are
the worker's own, of which `flushes` and the functions of CUPTI are parts of the others; `end` is what lies between the
worker's last phase and the end of its process, in which ncu prints. Exit code 1 when a way did not count every launch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from command import needed_gpu, started

from moetune.errors import RunError
from moetune.measure.counter_ways import CUPTI, NCU
from moetune.measure.counters import (
    SWEEP_SETS,
    CounterJob,
    CountersByJob,
    KernelCounters,
    RunPlan,
    assign,
    set_metrics,
)
from moetune.measure.counters_run import Counted, CountersRun, CounterWay
from moetune.outcome import Failed
from moetune_kernels.device import DeviceInfo
from moetune_kernels.table_file import read_table

LIMIT_S = 200.0
LOADING_S = 20.0  # surely enough for torch, Triton and CUPTI
NOT_PHASES = ("flushes", "cupti")  # parts of phases
COMPARED = ("duration_ns", "cycles_active", "issue_active_percent", "dram_bytes", "tensor_flops")

OpenRun = Callable[[RunPlan], CountersRun]


def main(
    arguments: Sequence[str], open_run: OpenRun = RunPlan.run, pause: Callable[[float], object] = time.sleep
) -> int:
    """Run both ways and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    options = parser.parse_args(arguments)
    needed_gpu()
    table = read_table(options.table)
    jobs = [CounterJob(shape=table.shape, tokens=tokens, plan=entry.plan) for tokens, entry in table.entries.items()]
    whole, read = True, dict[str, CountersByJob]()
    for way in (CUPTI, NCU):
        for how in ("cold", "ahead"):
            line, found = timed(way, jobs, table.device, how, open_run, pause)
            print(json.dumps(line), flush=True)
            whole = whole and "failed" not in line
            read[way.title] = found
    agreement = {name: agreement_of(name, read[CUPTI.title], read[NCU.title]) for name in COMPARED}
    print(json.dumps({"cupti_over_ncu": agreement}), flush=True)
    return 0 if whole else 1


def timed(
    way: CounterWay,
    jobs: Sequence[CounterJob],
    device: DeviceInfo,
    how: str,
    open_run: OpenRun,
    pause: Callable[[float], object],
) -> tuple[dict[str, Any], CountersByJob]:
    """Count once and return the line to print and what was counted."""
    head = {"way": way.title, "how": how}
    blocked = way.blocked(device)
    if blocked is not None:
        return head | {"failed": blocked.reason}, {}
    (chosen,) = SWEEP_SETS
    plan = RunPlan(way, way.readable(set_metrics(jobs[0].shape.format, chosen, device)), device)
    request = {"device_index": 0, "jobs": [job.to_json() for job in jobs]}
    try:
        with closing(open_run(plan)) as run:
            if how == "ahead":
                run.start(LIMIT_S, LIMIT_S)
                pause(LOADING_S)
            begin = time.monotonic()
            if how == "cold":
                run.start(LIMIT_S, LIMIT_S)
            run.wake(0)
            run.tell(request)
            counted = run.finish(LIMIT_S)
            seconds = time.monotonic() - begin
    except OSError as error:
        raise RunError(f"{way.title} could not be started: {error.strerror}") from None
    if isinstance(counted, Failed):
        return head | {"seconds": round(seconds, 2), "failed": counted.reason}, {}
    found = assign(jobs, counted, plan.names)
    return head | line_of(counted, found, seconds, how), found


def line_of(counted: Counted, found: CountersByJob, seconds: float, how: str) -> dict[str, Any]:
    """Return a run's numbers: seconds in all and by phase, entries and launches, and what failed first."""
    own = [value for name, value in counted.seconds.items() if not name.startswith(NOT_PHASES)]
    loading = counted.seconds.get("load", 0.0) if how == "ahead" else 0.0
    phases = {name: round(value, 4) for name, value in counted.seconds.items()}
    if own:  # waking, waiting for the jobs, and ending: what no phase covers
        phases["end"] = round(seconds - sum(own) + loading, 4)
    whole = [launches for launches in found.values() if not isinstance(launches, Failed)]
    failed = [launches.reason for launches in found.values() if isinstance(launches, Failed)]
    line = {
        "seconds": round(seconds, 2),
        "entries": len(whole),
        "launches": sum(map(len, whole)),
        "phases": phases,
    }
    return line | ({"failed": failed[0]} if failed else {})


def agreement_of(name: str, one: CountersByJob, other: CountersByJob) -> Mapping[str, float] | None:
    """Return the least, median and largest ratio of a value by the first way to that by the second, over all launches."""
    ratios: list[float] = []
    for job, launches in one.items():
        others = other.get(job)
        if isinstance(launches, Failed) or others is None or isinstance(others, Failed):
            continue
        pairs = zip(launches, others, strict=False)
        ratios += [ratio for first, second in pairs if (ratio := _ratio(name, first, second)) is not None]
    if not ratios:
        return None
    least, median, most = min(ratios), statistics.median(ratios), max(ratios)
    return {"least": round(least, 4), "median": round(median, 4), "most": round(most, 4), "launches": len(ratios)}


def _ratio(name: str, one: KernelCounters, other: KernelCounters) -> float | None:
    first, second = getattr(one, name), getattr(other, name)
    return first / second if one.kernel == other.kernel and first is not None and second else None


if __name__ == "__main__":
    sys.exit(started(main))
