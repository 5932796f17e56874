"""The tables that commands print: sized for 80 columns, every figure with its unit and source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moetune.profiling.terminal import LETTERS

if TYPE_CHECKING:
    from rich.table import Table

    from moetune_kernels.config import MoEKernelConfig
    from moetune_kernels.plan import LayerPlan
    from moetune_kernels.table import Entry

_TIMED = {
    "cuda": "us: the whole layer, cold, by CUDA events; default: the default plan, same run",
    "replay": "us: the whole layer as recorded, else the sum of its recorded kernels",
}
_FIGURES = """\
bound: share of the physical bound reached, which takes a copy's rate: weights
that are only read can pass 100%; figures: c hardware counter, e CUDA events,
s static (code over time), a analytical, p sum of parts, - unavailable
tiles: rows x columns of gate-up, then down; g gather, t tma, p tma_permute"""
_MARKS = {source.value: letter for source, letter in LETTERS.items()}


def tuned_table(entries: Mapping[int, Entry]) -> Table:
    """Return one row per token count: time, the default plan's, the share of the physical bound, and the figures."""
    shown = plain_table("tokens", "us", "default", "faster", "bound", "GB/s", "FLOP/B", "issue", left=("tiles",))
    for tokens, entry in entries.items():
        shown.add_row(
            str(tokens),
            amount(entry.median_us),
            amount(entry.baseline_us),
            "-" if entry.baseline_us is None else f"{entry.baseline_us / entry.median_us:.2f}x",
            f"{100 * entry.bound_us / entry.median_us:.0f}%",
            figure(entry.bandwidth_gbps),
            figure(entry.flops_per_byte),
            figure(entry.issue_efficiency),
            tiles(entry.plan),
        )
    return shown


def legend(backend: str) -> str:
    """Return what the columns of :func:`tuned_table` mean for a sweep on ``backend``."""
    return f"{_TIMED[backend]}\n{_FIGURES}"


def plain_table(*right: str, left: tuple[str, ...] = ()) -> Table:
    """Return an empty table: columns of numbers to the right, then columns of words."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in right:
        shown.add_column(name, justify="right", no_wrap=True)
    for name in left:
        shown.add_column(name, no_wrap=True)
    return shown


def amount(value: float | None) -> str:
    """Return a number with about four significant digits, ``-`` for none.

    >>> amount(12.345), amount(12345.6), amount(None)
    ('12.3', '12346', '-')
    """
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 1 else f"{value:.2f}"


def figure(value: Mapping[str, Any]) -> str:
    """Return a figure with the first letter of its source.

    >>> figure({"value": 4120.2, "source": "counter"})
    '4120c'
    """
    return amount(value["value"]) + _MARKS.get(value["source"], "")


def tiles(plan: LayerPlan) -> str:
    """Return both GEMMs' structures and tiles in a few letters, e.g. ``g16x64 t128``."""
    gate_up, down = plan.gate_up, plan.down
    return f"{_letter(gate_up)}{plan.block_m}x{gate_up.block_n} {_letter(down)}{down.block_n}"


def _letter(config: MoEKernelConfig) -> str:
    name = config.structure.value
    return _LETTERS.get(name, name)


_LETTERS = {"gather": "g", "tma": "t", "tma_permute": "p"}
