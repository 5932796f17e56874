"""The config heatmap: which tile sizes came how close to the best one, per kernel and token count."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from moetune.reporting.facts import Section
from moetune.reporting.heat_grid import MAX_COLUMNS, Cell, HeatGrid
from moetune.reporting.theme import GRID, HOLLOW, INK, MUTED, new_figure
from moetune.reporting.wording import counted, micros
from moetune_kernels.config import Role

WORST = 3.0  # times the best; slower cells share the last colour
_NAMES = {Role.GATE_UP: "gate-up", Role.DOWN: "down"}
_ON_DARK, _ON_LIGHT = "#fdfdfd", "#111111"  # on a coloured cell, whatever the page's theme
_COLOURS = colormaps["cividis_r"].resampled(32)  # made for colour-blind readers; light is fast; few enough for an SVG


def draw_heatmap(section: Section, grids: Sequence[HeatGrid]) -> Figure:
    """Draw one panel per grid, kernels in rows; needs at least one grid."""
    roles = [role for role in Role if any(grid.role is role for grid in grids)]
    figure = new_figure(0.9 + 2.75 * len(roles), f"Tile sizes tried · {section.title}")
    panels: list[list[Axes]] = figure.subplots(len(roles), MAX_COLUMNS, squeeze=False).tolist()
    norm = LogNorm(1.0, WORST)
    for row, role in enumerate(roles):
        of_role = [grid for grid in grids if grid.role is role]
        for column in range(MAX_COLUMNS):
            if column < len(of_role):
                _draw_panel(panels[row][column], of_role[column], norm, first=column == 0)
            else:
                panels[row][column].set_axis_off()
    _draw_key(figure, panels, norm)
    return figure


def _draw_panel(axes: Axes, grid: HeatGrid, norm: LogNorm, *, first: bool) -> None:
    for row, block_m in enumerate(grid.block_ms):
        for column, block_n in enumerate(grid.block_ns):
            cell = grid.cells.get((block_m, block_n))
            if cell is not None:
                _draw_cell(axes, column, row, cell, grid.best_us, norm)
    axes.set_xticks(range(len(grid.block_ns)), [str(value) for value in grid.block_ns])
    axes.set_yticks(range(len(grid.block_ms)), [str(value) for value in grid.block_ms])
    axes.set_xlim(-0.5, max(len(grid.block_ns), 2) - 0.5)
    axes.set_ylim(-0.5, max(len(grid.block_ms), 2) - 0.5)
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(f"{_NAMES[grid.role]}, {counted(grid.tokens, 'token')}", fontsize=9, loc="left", pad=16)
    best = "no config passed" if grid.best_us is None else f"best {micros(grid.best_us)} µs"
    axes.text(
        0.0, 1.02, f"{best}, {grid.measured} timed", transform=axes.transAxes, fontsize=8, color=MUTED, va="bottom"
    )
    axes.set_xlabel("block_n")
    if first:
        axes.set_ylabel("block_m")


def _draw_cell(axes: Axes, x: int, y: int, cell: Cell, best_us: float | None, norm: LogNorm) -> None:
    place = (x - 0.47, y - 0.47)
    if cell.best_us is None or best_us is None:
        axes.add_patch(Rectangle(place, 0.94, 0.94, facecolor=HOLLOW, edgecolor=MUTED, hatch="////", linewidth=0.6))
        box = {"boxstyle": "round,pad=0.15", "facecolor": HOLLOW, "edgecolor": "none"}
        text = f"{cell.failed}\nfailed"
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color=INK, bbox=box, linespacing=0.95)
        return
    times = cell.best_us / best_us
    colour = _COLOURS(norm(min(times, WORST)))
    ink = _ON_LIGHT if _luminance(colour) > 0.45 else _ON_DARK
    axes.add_patch(Rectangle(place, 0.94, 0.94, facecolor=to_hex(colour), edgecolor="none"))
    axes.text(x, y, f"{times:.2f}" if times < 10 else f"{times:.0f}", ha="center", va="center", fontsize=8, color=ink)
    if cell.failed:
        axes.text(x + 0.43, y + 0.43, "✕", ha="right", va="top", fontsize=6, color=ink)


def _draw_key(figure: Figure, panels: Sequence[Sequence[Axes]], norm: LogNorm) -> None:
    """Explain the colours on the right and the crosses below, outside every panel."""
    bar = figure.colorbar(
        ScalarMappable(norm, _COLOURS), ax=[axes for row in panels for axes in row], fraction=0.03, pad=0.02, aspect=30
    )  # pyright: ignore[reportArgumentType]
    bar.ax.yaxis.set_major_locator(FixedLocator([1, 1.1, 1.25, 1.5, 2, WORST]))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < WORST else f"{value:g}+"))
    assert bar.solids is not None
    bar.solids.set_edgecolor("face")  # else thin seams of paper show between the steps
    bar.set_label("time ÷ the best time")
    bar.outline.set_edgecolor(GRID)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    handles = [
        Patch(facecolor=HOLLOW, edgecolor=MUTED, hatch="////", label="every config of this tile failed"),
        Patch(facecolor="none", edgecolor="none", label="✕ in a corner: some failed     empty: not tried"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncol=2, handlelength=1.6)


def _luminance(colour: tuple[float, float, float, float]) -> float:
    red, green, blue, _ = colour
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
