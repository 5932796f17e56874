"""Times the plans of two tables of one layer against each other, in one process, interleaved per token count.

    python3 benchmarks/remeasure.py A.json B.json OUT.json --rounds 60

The timing is a sweep's own: whole layers by graph replay behind a cold L2, forward and reverse by turns, outputs compared
with float32. The default plan is the third of each round. Two tables with the same plan show how much timing alone differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from command import save, started

from moetune.errors import RunError, UsageError
from moetune.outcome import Failed, Outcome
from moetune_kernels.device import DeviceInfo
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MAX_TOKENS
from moetune_kernels.table import TunedTable
from moetune_kernels.table_file import read_table

ROUNDS = 60  # even; with a spread of 1% the median of so many is sure to 0.3%
NAMES = ("the first table's plan", "the second table's plan", "the default plan")


class Trials(Protocol):
    """Who times: :class:`moetune.measure.cuda.CudaTrials`."""

    @property
    def device(self) -> DeviceInfo:
        """The GPU."""
        ...

    def open(self, tokens: int) -> Failed | None:
        """Make inputs for one token count."""
        ...

    def time_layers(self, plans: Sequence[LayerPlan], rounds: int) -> Sequence[Outcome]:
        """Time whole layers, interleaved."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Remeasured:
    """Median microseconds of both plans and of the default plan at one token count, of one process."""

    tokens: int
    a_us: float
    b_us: float
    default_us: float
    same_plan: bool

    @property
    def differ(self) -> float:
        """How much slower one is than the other, as a share."""
        return abs(self.a_us - self.b_us) / min(self.a_us, self.b_us)

    @classmethod
    def from_json(cls, value: Any) -> Remeasured:
        """Parse what :func:`dataclasses.asdict` gave, from a file that anyone may have edited.

        Raises:
            UsageError: something else.
        """
        names = ("a_us", "b_us", "default_us")
        if not isinstance(value, Mapping) or set(value) != {"tokens", "same_plan", *names}:
            raise UsageError(f"a row must have tokens, same_plan, {', '.join(names)}")
        if type(value["tokens"]) is not int or not 1 <= value["tokens"] <= MAX_TOKENS:
            raise UsageError(f"a row's tokens must be a whole number from 1 to {MAX_TOKENS}")
        times_us = [value[name] for name in names]
        if not all(type(one) in (int, float) and isfinite(one) and one > 0 for one in times_us):
            raise UsageError("a row's times must be positive numbers")
        if type(value["same_plan"]) is not bool:
            raise UsageError("a row's same_plan must be true or false")
        return cls(**value)


def remeasured(trials: Trials, a: TunedTable, b: TunedTable, rounds: int) -> list[Remeasured]:
    """Time all token counts that both tables have.

    Raises:
        UsageError: the tables have not the same layer and token counts.
        RunError: a plan of a table cannot be timed, or its output was wrong.
    """
    if a.shape.key != b.shape.key or set(a.entries) != set(b.entries):
        raise UsageError("both tables must be of one layer and have the same token counts")
    return [_at(trials, tokens, (a, b), rounds) for tokens in sorted(a.entries)]


def _at(trials: Trials, tokens: int, tables: tuple[TunedTable, TunedTable], rounds: int) -> Remeasured:
    failed = trials.open(tokens)
    if failed is not None:
        raise RunError(f"{tokens} tokens could not be opened: {failed.reason}")
    first, second = (table.entries[tokens].plan for table in tables)
    plans = [first, second, heuristic_plan(tables[0].shape, tokens, trials.device)]
    times_us: list[float] = []
    for name, outcome in zip(NAMES, trials.time_layers(plans, rounds), strict=True):
        if isinstance(outcome, Failed):
            raise RunError(f"{tokens} tokens: {name} failed when it was timed again: {outcome.reason}")
        times_us.append(outcome.median_us)
    a_us, b_us, default_us = times_us
    return Remeasured(tokens=tokens, a_us=a_us, b_us=b_us, default_us=default_us, same_plan=first == second)


def main(arguments: Sequence[str]) -> int:
    """Time two tables and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("a", "b", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(arguments)
    a, b = read_table(options.a), read_table(options.b)
    from moetune.measure.cuda import CudaTrials

    trials = CudaTrials(a.shape)
    try:
        rows = remeasured(trials, a, b, options.rounds)
    finally:
        trials.close()
    save(options.out, {"rows": [asdict(row) for row in rows]})
    for row in rows:
        same = "same plan" if row.same_plan else ""
        print(f"{row.tokens:6d} {row.a_us:10.1f} {row.b_us:10.1f} {row.default_us:10.1f} {row.differ:8.2%} {same}")
    return 0


if __name__ == "__main__":
    sys.exit(started(main))
