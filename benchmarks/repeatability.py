"""Whether two sweeps of one layer choose equally fast plans: pairs of sweeps, all plans timed again in one process.

    python3 benchmarks/repeatability.py OUT.json --pairs 5 --model qwen3-30b-a3b
    python3 benchmarks/repeatability.py MORE.json --from OUT.json      # the pairs that are missing there

Each sweep has a new store and a new folder of tables; the Triton cache is one for all of a command (`TRITON_CACHE_DIR`, when it
is set). A pair is written as soon as it is done, and none is begun that would not end in time. Exit code 1 when two times of
a token count differ by more than 2%, when a sweep failed, or when pairs are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from command import STOP_AFTER_S, Stopwatch, heading, needed_gpu, save, split, started
from remeasure import ROUNDS, Remeasured
from sweeps import Ended, Place, model_options, run_sweep

from moetune.cli.options import SWEEP_TOKENS, parse_tokens
from moetune.errors import RunError, UsageError

GOAL = 0.02
LIMIT_S = 300.0  # of one sweep, and of timing two tables again
MARGIN = 1.2  # times the slowest pair so far: what the next one may take
MAX_FILE_BYTES = 16 << 20

RunSweep = Callable[[Place, Sequence[str], float], Ended]
TimeAgain = Callable[[Place, Place, float], list[Remeasured]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two sweeps: their wall seconds, and the rows of both tables timed again."""

    sweep_s: tuple[float, float]
    rows: list[Remeasured]

    @property
    def worst(self) -> Remeasured:
        """The token count at which both differ most."""
        return max(self.rows, key=lambda row: row.differ)

    @classmethod
    def from_json(cls, value: Any) -> Pair:
        """Parse one pair of an earlier file; raises UsageError where it is something else."""
        if not isinstance(value, Mapping) or set(value) != {"sweep_s", "rows"} or not isinstance(value["rows"], list):
            raise UsageError("a pair must have sweep_s and rows")
        seconds, rows = value["sweep_s"], [Remeasured.from_json(row) for row in value["rows"]]
        if not isinstance(seconds, list) or [type(one) for one in seconds] != [float, float] or not rows:
            raise UsageError("a pair must have the seconds of two sweeps, and rows")
        return cls(sweep_s=(seconds[0], seconds[1]), rows=rows)


def main(arguments: Sequence[str], run: RunSweep = run_sweep, time_again: TimeAgain | None = None) -> int:
    """Run the pairs that are missing and return the exit code."""
    own, sweep_options = split(arguments)
    options = parsed(own)
    clock = Stopwatch(options.stop_after)
    what = {"model": options.model, "tokens": list(parse_tokens(options.tokens)), "sweep_options": sweep_options}
    pairs = [] if options.earlier is None else earlier_pairs(options.earlier, what)
    gpu = needed_gpu()
    head = heading(gpu) | what
    layer = [*model_options(options.model), "--tokens", options.tokens, *sweep_options]
    with tempfile.TemporaryDirectory(prefix="moetune-pairs-") as name:
        folder = Path(name)
        cache = Path(os.environ.get("TRITON_CACHE_DIR") or folder / "triton")
        slowest_s = 0.0
        while len(pairs) < options.pairs and MARGIN * slowest_s < clock.left_s:
            began_s = clock.left_s
            places = [Place(folder / f"{len(pairs)}{side}", cache) for side in "ab"]
            pairs.append(pair_of(places, layer, clock, run=run, time_again=time_again or timed_again))
            slowest_s = max(slowest_s, began_s - clock.left_s)
            save(options.out, head | {"pairs": [asdict(pair) for pair in pairs]})
            print("\n".join(lines_of(len(pairs), pairs[-1])), flush=True)
    return verdict(pairs, options.pairs, options.out)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a catalogue name, or `default`")
    parser.add_argument("--tokens", default=SWEEP_TOKENS, metavar="LIST")
    parser.add_argument("--from", type=Path, dest="earlier", metavar="FILE", help="results to go on from")
    parser.add_argument("--stop-after", type=float, default=STOP_AFTER_S, metavar="SECONDS")
    return parser.parse_args(arguments)


def earlier_pairs(path: Path, what: Mapping[str, Any]) -> list[Pair]:
    """Return the pairs of an earlier file.

    Raises:
        UsageError: it cannot be read, or is of another layer, other token counts or other options.
    """
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(MAX_FILE_BYTES))
        if not isinstance(value, dict) or not isinstance(value.get("pairs"), list):
            raise UsageError("it holds no pairs")
        for name, wanted in what.items():
            if value.get(name) != wanted:
                raise UsageError(f"its {name} is {str(value.get(name))[:80]}, asked was {str(wanted)[:80]}")
        return [Pair.from_json(pair) for pair in value["pairs"]]
    except (OSError, ValueError, RecursionError) as error:  # a UsageError is a ValueError
        raise UsageError(f"--from {path}: {error}; give a file that this benchmark wrote for the same sweep") from None


def pair_of(
    places: Sequence[Place], options: Sequence[str], clock: Stopwatch, *, run: RunSweep, time_again: TimeAgain
) -> Pair:
    """Sweep twice and time both tables again.

    Raises:
        RunError: a sweep failed, or the plans could not be timed again.
    """
    seconds: list[float] = []
    for place in places:
        ended = run(place, options, min(LIMIT_S, clock.left_s))
        if ended.failure:
            raise RunError(ended.failure)
        seconds.append(round(ended.seconds, 2))
    first, second = places
    return Pair(sweep_s=(seconds[0], seconds[1]), rows=time_again(first, second, min(LIMIT_S, clock.left_s)))


def timed_again(first: Place, second: Place, limit_s: float) -> list[Remeasured]:
    """Time both tables in a process of its own, so that none is on the GPU while the next pair is swept.

    Raises:
        RunError: it failed; the message is its own.
    """
    out = second.folder / "remeasured.json"
    script = Path(__file__).with_name("remeasure.py")
    command = [sys.executable, str(script), str(first.table_path()), str(second.table_path()), str(out)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(second.cache)}
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=limit_s, env=environment)
    except subprocess.TimeoutExpired:
        raise RunError(f"timing two tables again did not end within {limit_s:.0f} s") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise RunError(said[-1] if said else f"remeasure.py ended with exit code {done.returncode}")
    return [Remeasured.from_json(row) for row in json.loads(out.read_text(encoding="utf-8"))["rows"]]


def lines_of(number: int, pair: Pair) -> list[str]:
    """Return the table of one pair."""
    lines = [
        f"pair {number}: sweeps of {pair.sweep_s[0]:.1f} and {pair.sweep_s[1]:.1f} s, {ROUNDS} rounds of each plan"
    ]
    lines.append("tokens       a us       b us  default us    differ")
    for row in pair.rows:
        notes = ["same plan"] * row.same_plan + ["OVER THE GOAL"] * (row.differ > GOAL)
        times = f"{row.a_us:10.1f} {row.b_us:10.1f} {row.default_us:11.1f}"
        lines.append(f"{row.tokens:6d} {times} {row.differ:9.2%}  {', '.join(notes)}".rstrip())
    return lines


def verdict(pairs: Sequence[Pair], wanted: int, out: Path) -> int:
    """Print what all pairs say and return the exit code."""
    if pairs:
        number, worst = max(enumerate((pair.worst for pair in pairs), start=1), key=lambda found: found[1].differ)
        same = [row.differ for pair in pairs for row in pair.rows if row.same_plan]
        print("worst of each pair: " + ", ".join(f"{pair.worst.differ:.2%}" for pair in pairs))
        print(
            f"worst of all: {worst.differ:.2%} at {worst.tokens} tokens in pair {number}; the goal is {GOAL:.0%} at most"
        )
        noise = f", which differ by up to {max(same):.2%} by timing alone" if same else ""
        print(f"same plan in {len(same)} of {sum(len(pair.rows) for pair in pairs)} choices{noise}")
    if len(pairs) < wanted:
        print(f"{len(pairs)} of {wanted} pairs are done; go on with --from {out}")
        return 1
    return int(any(pair.worst.differ > GOAL for pair in pairs))


if __name__ == "__main__":
    sys.exit(started(main))
