"""What a sweep is asked for, and what it leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moetune.engine.decide import NOISE
from moetune.engine.events import GapProbed
from moetune.models.routing import UNIFORM, Routing
from moetune.outcome import ClockSpan
from moetune.space import FREE, Limits
from moetune_kernels.shape import MoEShape
from moetune_kernels.table import TunedTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """What ``moetune sweep`` was asked for.

    Args:
        shape: the layer.
        tokens: token counts to tune.
        between: look between these too, and tune those where no neighbour's plan is good enough.
        budget_s: wall seconds; None for no limit.
        device_index: CUDA device, relative to CUDA_VISIBLE_DEVICES; a table is of its model.
        beside: further devices that share the work, where they are of that model; None for every idle one.
        out_dir: where the table goes; None for the user's tables, or ``./moetune-replay`` without a GPU.
        store_path: the trial store; None for the default one.
        fresh: ignore the trials of earlier sweeps.
        model: the model's name, for people.
        seed: of inputs and of strategies that draw.
        command: the command line, for the table.
        record: file for a recording of all trials (``.jsonl.xz``).
        strategy: which search races the candidates.
        routing: how tokens choose experts while they are timed.
        noise: the share of a time under which two plans are equal and the simpler one wins.
        strict: refuse a GPU that others use or that is throttled, and entries that were measured while it was.
        limits: what may win, and so what is tried.
    """

    shape: MoEShape
    tokens: tuple[int, ...]
    between: bool = False
    budget_s: float | None = None
    device_index: int = 0
    beside: tuple[int, ...] | None = ()
    out_dir: Path | None = None
    store_path: Path | None = None
    fresh: bool = False
    model: str | None = None
    seed: int = 0
    command: str = "moetune sweep"
    record: Path | None = None
    strategy: str = "guided"
    routing: Routing = UNIFORM
    noise: float = NOISE
    strict: bool = False
    limits: Limits = FREE


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What a sweep left.

    ``failures`` and ``removed`` count trials that failed, and configs that cannot run or are outside the limits, by
    reason; ``probes`` is what was timed between the entries; ``kept`` are the token counts of the table that an earlier sweep measured. ``clocks`` are the GPU's while this
    sweep timed on it, and ``held_down`` the token counts whose finals were timed under each reason that the GPU gave.
    """

    table_path: Path
    table: TunedTable
    store_path: Path
    trials: int
    failures: Counter[str]
    removed: Counter[str]
    backend: str
    stopped_early: bool
    kept: tuple[int, ...] = ()
    clocks: ClockSpan | None = None
    probes: tuple[GapProbed, ...] = ()
    held_down: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
