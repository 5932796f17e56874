"""How long `moetune sweep` takes for 18 token counts, seen from outside, and how busy the GPU is while it measures.

    python3 benchmarks/sweep_times.py OUT.json --model qwen3-30b-a3b mixtral-8x7b
    python3 benchmarks/sweep_times.py OUT.json -- --budget 60        # options behind -- go to the sweeps

Three sweeps of each model: `cold` with an empty Triton cache and a new store, `warm` with that cache and a new store, `again`
with the cache and the store of the one before. Exit code 1 when a sweep failed, or when there was no time for it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from command import STOP_AFTER_S, Stopwatch, heading, needed_gpu, save, split, started
from gpu_watch import GpuWatch, Mean, Nvml, mean_over
from stored import StoredSweep, last_sweep
from sweeps import Ended, Place, model_options, run_sweep

from moetune.errors import MoetuneError, RunError, UsageError

COLD, WARM, AGAIN = "cold", "warm", "again"
GOALS_S = {COLD: 60.0, WARM: 20.0}
LIMIT_S = 300.0  # of one sweep: one that takes longer hangs
LEAST_S = 10.0  # a sweep is not begun with less
COVERED = 0.8  # of the measuring time: a mean of fewer readings is not shown
IMPORTS = "import torch, triton, moetune.tuning, moetune.measure.cuda"  # once, or the first sweep pays for a cold disk

RunSweep = Callable[[Place, Sequence[str], float], Ended]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sweep. Seconds are wall time from outside; ``measuring_s`` from its first trial to its last but counters.

    ``busy_percent`` and ``sm_mhz`` are means over the measuring time; None where nobody could read them.
    """

    model: str
    kind: str
    seconds: float
    code: int
    failure: str | None
    compiled: int = 0
    trials: int = 0
    configs: int = 0
    entries: int = 0
    first_trial_s: float | None = None
    measuring_s: float | None = None
    after_s: float | None = None
    busy_percent: float | None = None
    busy_covered: float | None = None
    sm_mhz: float | None = None

    @property
    def goal(self) -> str:
        """The goal in seconds, and whether it is met; nothing where there is none."""
        goal_s = GOALS_S.get(self.kind)
        if goal_s is None:
            return "-"
        return f"{goal_s:.0f} {'met' if self.code == 0 and self.seconds <= goal_s else 'MISSED'}"


def main(arguments: Sequence[str], run: RunSweep = run_sweep, watch: Callable[[], GpuWatch] | None = None) -> int:
    """Run the sweeps of all models and return the exit code."""
    own, sweep_options = split(arguments)
    options = parsed(own)
    clock = Stopwatch(options.stop_after)
    gpu = needed_gpu()
    watch = watch or (lambda: GpuWatch(Nvml(gpu)))
    results: dict[str, Any] = heading(gpu) | {"sweep_options": sweep_options, "import_s": imported(), "sweeps": []}
    rows: list[Row] = []
    print(HEAD, flush=True)
    for model in options.model * options.repeat:
        for row in of_model(model, sweep_options, run=run, watch=watch, clock=clock):
            rows.append(row)
            results["sweeps"].append(asdict(row))
            save(options.out, results)
            print(line_of(row), flush=True)
    for row in rows:
        if row.failure:
            print(f"{row.model} {row.kind}: {row.failure}")
    return int(any(row.code != 0 for row in rows))


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; raises UsageError where nothing would be swept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--model", nargs="+", default=["qwen3-30b-a3b"], help="catalogue names, or `default`")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="do it all N times")
    parser.add_argument("--stop-after", type=float, default=STOP_AFTER_S, metavar="SECONDS")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        raise UsageError(f"--repeat must be at least 1, got {options.repeat}")
    return options


def imported() -> float:
    """Import what a sweep imports once, in a process of its own, and return the seconds that it took."""
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], check=False, capture_output=True)
    return round(time.monotonic() - began_s, 1)


def of_model(
    model: str, options: Sequence[str], *, run: RunSweep, watch: Callable[[], GpuWatch], clock: Stopwatch
) -> Iterator[Row]:
    """Yield the rows of one model's three sweeps; those behind a failed one are not run."""
    options = [*model_options(model), *options]
    with tempfile.TemporaryDirectory(prefix="moetune-times-") as name:
        folder = Path(name)
        cold, warm = (Place(folder / kind, folder / "triton") for kind in (COLD, WARM))
        for kind, place in ((COLD, cold), (WARM, warm), (AGAIN, warm)):
            if clock.left_s < LEAST_S:
                yield Row(model=model, kind=kind, seconds=0.0, code=1, failure="there was no time left for it")
                return
            before, began_s = place.kernels(), time.time()
            with watch() as watched:
                ended = run(place, options, min(LIMIT_S, clock.left_s))
            yield row_of(model, kind, ended, facts=Facts(place, place.kernels() - before, began_s, watched))
            if ended.code != 0:
                return


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a sweep beside how it ended: its place, kernels compiled, its start, the GPU meanwhile."""

    place: Place
    compiled: int
    began_s: float
    watched: GpuWatch


def row_of(model: str, kind: str, ended: Ended, facts: Facts) -> Row:
    """Return the row of a sweep that ended somehow."""
    known: dict[str, Any] = {"compiled": facts.compiled}
    failure = ended.failure
    try:
        known |= stored_facts(last_sweep(facts.place.store), ended, facts)
        known["entries"] = len(facts.place.table().entries)
    except MoetuneError as error:  # of a sweep that failed there is less to tell, and its own words say why
        failure = failure or str(error)
    code = ended.code if ended.code != 0 or failure is None else 1
    return Row(model=model, kind=kind, seconds=round(ended.seconds, 2), code=code, failure=failure, **known)


def stored_facts(stored: StoredSweep, ended: Ended, facts: Facts) -> dict[str, Any]:
    """Return the fields of a row that the store tells, and those of its measuring time."""
    if stored.run.backend != "cuda":
        raise RunError(f"the sweep did not measure: its backend was {stored.run.backend}")
    found: dict[str, Any] = {"trials": stored.trials, "configs": stored.configs}
    if stored.window is None:
        return found
    begin, end = stored.window
    busy, sm_mhz = (mean_over(readings, (begin, end)) for readings in (facts.watched.busy, facts.watched.sm_mhz))
    return found | {
        "first_trial_s": round(begin - facts.began_s, 2),
        "measuring_s": round(end - begin, 2),
        "after_s": round(facts.began_s + ended.seconds - end, 2),
        "busy_percent": shown(busy),
        "busy_covered": None if busy is None else round(busy.covered, 3),
        "sm_mhz": shown(sm_mhz),
    }


def shown(mean: Mean | None) -> float | None:
    """Return a mean that enough readings made, else None."""
    return None if mean is None or mean.covered < COVERED else round(mean.value, 1)


HEAD = (
    "model             sweep     wall s  goal s      exit  trials  configs  compiled  entries  "
    "first trial s  measuring s  after s  busy %  SM MHz"
)


def line_of(row: Row) -> str:
    """Return one line of the table; a dash where nothing is known."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return (
        f"{row.model:17s} {row.kind:6s} {row.seconds:9.1f}  {row.goal:10s} {row.code:5d} {row.trials:7d} {row.configs:8d} "
        f"{row.compiled:9d} {row.entries:8d} {number(row.first_trial_s, 1):>14s} {number(row.measuring_s, 1):>12s} "
        f"{number(row.after_s, 1):>8s} {number(row.busy_percent, 1):>7s} {number(row.sm_mhz, 0):>7s}"
    )


if __name__ == "__main__":
    sys.exit(started(main))
