"""Trials as a grid: the best time of each tile size, and why the rest has none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moetune.outcome import Failed, FailureKind, Measured, Trial
from moetune_kernels.config import MoEKernelConfig, Role

MAX_COLUMNS = 3  # panels that fit beside each other and stay readable
MAX_REASONS = 4
_NUMBER = re.compile(r"\d+(\.\d+)?")
AT_COMPILE = 0  # the token count of a trial that ended at compile: it failed for all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All trials of one tile size at one token count."""

    best_us: float | None
    measured: int
    failures: Mapping[FailureKind, int]

    @property
    def failed(self) -> int:
        """Trials without a time."""
        return sum(self.failures.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatGrid:
    """One kernel at one token count. ``cells`` is keyed by (block_m, block_n)."""

    role: Role
    tokens: int
    block_ms: tuple[int, ...]
    block_ns: tuple[int, ...]
    cells: Mapping[tuple[int, int], Cell]
    best_us: float | None
    reasons: tuple[tuple[FailureKind, str, int], ...]  # most frequent first

    @property
    def failures(self) -> Counter[FailureKind]:
        """Trials without a time, by kind."""
        return sum((Counter(cell.failures) for cell in self.cells.values()), Counter[FailureKind]())

    @property
    def measured(self) -> int:
        """Trials with a time."""
        return sum(cell.measured for cell in self.cells.values())


def heat_grids(trials: Iterable[Trial], role: Role) -> list[HeatGrid]:
    """Return up to ``MAX_COLUMNS`` grids of one kernel, at token counts spread over what was tried."""
    by_tokens: dict[int, list[Trial]] = {}
    for trial in trials:
        if trial.subject.value == role.value and isinstance(trial.choice, MoEKernelConfig):
            by_tokens.setdefault(trial.tokens, []).append(trial)
    everywhere = by_tokens.pop(AT_COMPILE, [])
    return [
        _grid(role, tokens, [*by_tokens[tokens], *everywhere]) for tokens in _spread(sorted(by_tokens), MAX_COLUMNS)
    ]


def _grid(role: Role, tokens: int, trials: Sequence[Trial]) -> HeatGrid:
    by_tile: dict[tuple[int, int], list[Trial]] = {}
    for trial in trials:
        assert isinstance(trial.choice, MoEKernelConfig)
        by_tile.setdefault((trial.choice.block_m, trial.choice.block_n), []).append(trial)
    cells = {tile: _cell(group) for tile, group in by_tile.items()}
    failed = [trial.outcome for trial in trials if isinstance(trial.outcome, Failed)]
    return HeatGrid(
        role=role,
        tokens=tokens,
        block_ms=tuple(sorted({block_m for block_m, _ in cells})),
        block_ns=tuple(sorted({block_n for _, block_n in cells})),
        cells=cells,
        best_us=min((cell.best_us for cell in cells.values() if cell.best_us is not None), default=None),
        reasons=_reasons(failed),
    )


def _reasons(failed: Sequence[Failed]) -> tuple[tuple[FailureKind, str, int], ...]:
    """Count failures that differ in their numbers only as one, told by the first of them."""
    alike: dict[tuple[FailureKind, str], list[str]] = {}
    for outcome in failed:
        alike.setdefault((outcome.kind, _NUMBER.sub("#", outcome.reason)), []).append(outcome.reason)
    most = sorted(alike.items(), key=lambda one: -len(one[1]))[:MAX_REASONS]
    return tuple((kind, reasons[0], len(reasons)) for (kind, _), reasons in most)


def _cell(trials: Sequence[Trial]) -> Cell:
    times = [trial.outcome.median_us for trial in trials if isinstance(trial.outcome, Measured)]
    failures = Counter(trial.outcome.kind for trial in trials if isinstance(trial.outcome, Failed))
    return Cell(best_us=min(times, default=None), measured=len(times), failures=failures)


def _spread(values: Sequence[int], count: int) -> list[int]:
    """Pick ``count`` values evenly, the first and the last among them.

    >>> _spread([1, 2, 4, 8, 16], 3)
    [1, 4, 16]
    """
    if len(values) <= count:
        return list(values)
    return [values[round(step * (len(values) - 1) / (count - 1))] for step in range(count)]
