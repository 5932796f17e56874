"""Trials and runs as tables of 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from moetune.cli.output import printable
from moetune.cli.results import amount, figure, plain_table, tiles
from moetune.outcome import Compiled, Failed, Source
from moetune.profiling.terminal import LETTERS
from moetune.store import ListedTrial, RunRow
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.plan import LayerPlan

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

FIGURES_LEGEND = """\
us: median, or why there is none; v: matched the reference; figures: c hardware
counter, e CUDA events, s static, a analytical, p sum of parts, - unavailable
regs: registers per thread, + spilled"""
CONFIG_LEGEND = """\
config: g gather, t tma, p tma_permute; rows x columns x depth of a tile, warps,
prefetch depth, register cap, row group; of a layer, gate-up's tile, then down's"""
SHORT_RUN = 8  # characters of a run's id
EVERY_COUNT = "all"
_STRUCTURES = {Structure.GATHER: "g", Structure.TMA: "t", Structure.TMA_PERMUTE: "p"}


def sections(listed: Sequence[ListedTrial], *, reasons: bool, by_run: bool) -> Iterator[RenderableType]:
    """Yield a heading and a table for each stretch of trials of one run, or of one device with its versions.

    Args:
        listed: in the order to show.
        reasons: tell why trials have no time, in the place of figures.
        by_run: head the stretches by run.
    """
    from rich.text import Text

    heading: Callable[[RunRow], str] = run_heading if by_run else device_heading
    for text, group in groupby(listed, key=lambda one: heading(one.run)):
        trials = list(group)
        yield Text(text)
        yield reasons_table(trials) if reasons else trials_table(trials)
        yield Text("")


def run_heading(run: RunRow) -> str:
    """Return two lines: layer and device, then the run and the versions that its times depend on."""
    who = f"recording {run.run}" if _is_recording(run) else f"run {run.run[:SHORT_RUN]}"
    return printable(f"{_layer(run)}\n{who}, {moment(run.started_at)}; {_versions(run)}")


def device_heading(run: RunRow) -> str:
    """Return two lines: layer and device, then the versions that its times depend on."""
    return printable(f"{_layer(run)}\n{_versions(run)}")


def _layer(run: RunRow) -> str:
    return f"{run.shape.key} on {_device(run)}, {run.backend}"


def _device(run: RunRow) -> str:
    return run.device.name if run.device.mig is None else f"{run.device.name} MIG {run.device.mig}"


def _versions(run: RunRow) -> str:
    return f"triton {run.triton}, torch {run.torch}, driver {run.driver}"


def _is_recording(run: RunRow) -> bool:
    return "." in run.run  # a file's name; the id of a run has only letters and digits


def trials_table(listed: Sequence[ListedTrial]) -> Table:
    """Return one row per trial: time or kind of failure, figures with their sources, registers and config."""
    shown = plain_table("tokens", left=("subject",))
    for name in ("us", "GB/s", "FLOP/B", "issue", "regs"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    shown.add_column("config", overflow="fold")
    for one in listed:
        trial = one.trial
        shown.add_row(
            str(trial.tokens or EVERY_COUNT),
            trial.subject.value,
            *_outcome_cells(one),
            _registers(trial.compiled),
            "v" if trial.verified else "",
            choice_text(trial.choice),
        )
    return shown


def _outcome_cells(one: ListedTrial) -> tuple[str, str, str, str]:
    outcome = one.trial.outcome
    if isinstance(outcome, Failed):
        return outcome.kind.value, "", "", ""
    source = "" if outcome.source is Source.EVENT else LETTERS[outcome.source]
    figures = (outcome.bandwidth_gbps, outcome.flops_per_byte, outcome.issue_efficiency)
    bandwidth, flops, issue = (figure(one.to_json()) for one in figures)
    return amount(outcome.median_us) + source, bandwidth, flops, issue


def reasons_table(listed: Sequence[ListedTrial]) -> Table:
    """Return one row per trial without a time: how it ended, its config, and the whole reason."""
    shown = plain_table("tokens", left=("subject", "kind"))
    shown.add_column("config", overflow="fold")
    shown.add_column("reason", overflow="fold")
    for one in listed:
        trial, outcome = one.trial, one.trial.outcome
        assert isinstance(outcome, Failed)
        shown.add_row(
            str(trial.tokens or EVERY_COUNT),
            trial.subject.value,
            outcome.kind.value,
            choice_text(trial.choice),
            printable(" ".join(outcome.reason.split())),
        )
    return shown


def run_sections(runs: Sequence[RunRow], trials_of_runs: Mapping[str, tuple[int, int]]) -> Iterator[RenderableType]:
    """Yield a heading and a table for each stretch of runs on one device with its versions.

    Args:
        runs: in the order to show.
        trials_of_runs: how many trials each has, and how many of them have no time.
    """
    from rich.text import Text

    for text, group in groupby(runs, key=lambda run: f"{_device(run)}, {run.backend}: {_versions(run)}"):
        shown = plain_table(left=("run", "started", "layer"))
        for name in ("trials", "failed", "ended"):
            shown.add_column(name, justify="right", no_wrap=True)
        for run in group:
            counts = trials_of_runs.get(run.run, (0, 0))
            name = "recorded" if _is_recording(run) else run.run[:SHORT_RUN]
            shown.add_row(name, moment(run.started_at), run.shape.key, *map(str, counts), _end(run))
        yield Text(printable(text))
        yield shown
        yield Text("")


def _end(run: RunRow) -> str:
    """Return ``yes``, ``no`` for a run that was stopped or still runs, ``-`` where nobody knows."""
    return "yes" if run.ended_at is not None else "-" if run.moetune is None else "no"


def moment(text: str) -> str:
    """Return the date and time to the minute.

    >>> moment("2026-12-01T08:00:12.345+00:00")
    '2026-12-01 08:00'
    """
    return printable(text[:16].replace("T", " "))


def choice_text(choice: MoEKernelConfig | LayerPlan | int) -> str:
    """Return a config, a plan's two tiles, or routing's block_m, in few letters."""
    if isinstance(choice, LayerPlan):
        return tiles(choice)
    if not isinstance(choice, MoEKernelConfig):
        return f"block_m {choice}" if choice else ""
    parts = [
        f"{_STRUCTURES.get(choice.structure, choice.structure.value)}{choice.block_m}x{choice.block_n}x{choice.block_k}",
        f"w{choice.num_warps}",
        f"p{choice.prefetch_distance}",
    ]
    parts += [f"r{choice.max_registers}"] if choice.max_registers is not None else []
    parts += [f"g{choice.group_m}"] if choice.group_m != 1 else []
    parts += [f"s{choice.split_k}"] if choice.split_k != 1 else []
    return " ".join(parts)


def _registers(compiled: Compiled | None) -> str:
    if compiled is None:
        return ""
    return f"{compiled.registers}+{compiled.spills}" if compiled.spills else str(compiled.registers)
