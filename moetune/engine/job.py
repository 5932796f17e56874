"""What one sweep is to do, what it needs of the world, and what it leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moetune.engine.backend import Ceilings
from moetune.engine.bench import Journal, Key
from moetune.engine.budget import Budget
from moetune.engine.decide import NOISE
from moetune.engine.events import Emit, GapProbed
from moetune.outcome import FailureKind, Trial
from moetune.space import FREE, Limits
from moetune.strategies.base import StrategyFactory
from moetune_kernels.plan import LayerPlan
from moetune_kernels.table import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to tune and how hard.

    Args:
        tokens: token counts, each at least 1.
        budget: wall time, running.
        kernels: how many candidates are compiled at the start, both roles together.
        polish: how many kernels the searches may have compiled besides, both roles together.
        probes: between how many neighbouring entries plans are timed, to see what serves there and what that loses.
        seed: of the strategies that draw.
        noise: the share of a time under which two plans are equal.
        strict: write no entry that was measured while the GPU was held down.
        limits: what may win.
    """

    tokens: tuple[int, ...]
    budget: Budget
    kernels: int
    polish: int
    probes: int = 0
    seed: int = 0
    noise: float = NOISE
    strict: bool = False
    limits: Limits = FREE


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What a session needs of the world beside the backend.

    Args:
        journal: keeps every ended trial.
        known: screenings of earlier runs that need not be repeated.
        strategy: makes the search of one race.
        default_plan: the plan to beat at a token count.
        write_table: writes the entries so far and returns the file.
        emit: told of everything.
    """

    journal: Journal
    known: Mapping[Key, Trial]
    strategy: StrategyFactory
    default_plan: Callable[[int], LayerPlan]
    write_table: Callable[[Mapping[int, Entry], Ceilings], Path]
    emit: Emit


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """What a session leaves: entries by token count, what was timed between them, the file, and how trials ended."""

    entries: Mapping[int, Entry]
    table_path: Path
    trials: int
    failures: Counter[FailureKind]
    removed: Counter[str]
    stopped_early: bool
    probes: tuple[GapProbed, ...] = ()
