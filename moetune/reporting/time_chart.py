"""Time per token count beside the physical bound and the default plan, and what tuning gained."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moetune.reporting.axis import MAX_LABELLED_BARS, log_scale, token_categories, token_scale
from moetune.reporting.facts import Point, Section
from moetune.reporting.theme import BOUND, DEFAULT, MUTED, TUNED, legend_above, new_figure


def draw_times(section: Section) -> Figure:
    """Draw time over tokens, log-log, above the speedup over the default plan; needs at least one point."""
    figure = new_figure(6.2, f"Layer time · {section.title}")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    _draw_lines(above, section.points)
    _draw_speedups(below, section.points)
    return figure


def _draw_lines(axes: Axes, points: Sequence[Point]) -> None:
    times = [point.median_us for point in points]
    others = [value for point in points for value in (point.baseline_us, point.bound_us) if value is not None]
    token_scale(axes, [point.tokens for point in points])
    log_scale(axes, axes.yaxis, min([*times, *others]) / 1.5, max([*times, *others]) * 1.5)
    handles = [
        *_line(axes, [(p.tokens, p.baseline_us) for p in points], "s", DEFAULT, "dotted", "default plan"),
        *_line(axes, [(p.tokens, p.median_us) for p in points], "o", TUNED, "solid", "tuned plan"),
        *_line(axes, [(p.tokens, p.bound_us) for p in points], "", BOUND, "dashed", "physical bound"),
    ]
    axes.set_ylabel("time of one layer, µs")
    axes.grid(visible=True)
    legend_above(axes, handles, columns=3)


def _line(
    axes: Axes, values: Sequence[tuple[int, float | None]], marker: str, colour: str, dashes: str, label: str
) -> list[Line2D]:
    known = [(tokens, value) for tokens, value in values if value is not None]
    if not known:
        return []
    xs, ys = zip(*known, strict=True)
    marker = marker or ("_" if len(known) == 1 else "")  # a line of one point shows nothing
    return axes.plot(xs, ys, marker=marker, markersize=4.5, color=colour, linestyle=dashes, linewidth=1.8, label=label)


def _draw_speedups(axes: Axes, points: Sequence[Point]) -> None:
    known = [(point.tokens, point.speedup) for point in points if point.speedup is not None]
    if not known:
        axes.text(
            0.5, 0.5, "this table has no times of the default plan", ha="center", color=MUTED, transform=axes.transAxes
        )
        axes.set_axis_off()
        return
    xs = token_categories(axes, [tokens for tokens, _ in known])
    speedups = [speedup for _, speedup in known]
    top = max([1.0, *speedups])
    axes.bar(xs, speedups, 0.72, color=TUNED)
    axes.axhline(1.0, color=DEFAULT, linewidth=1.4, linestyle="dotted")
    axes.set_ylim(0, top * 1.18)
    if len(known) <= MAX_LABELLED_BARS:
        for x, speedup in zip(xs, speedups, strict=True):
            axes.text(x, speedup + top * 0.02, f"{speedup:.2f}", ha="center", va="bottom", fontsize=8)
    axes.set_ylabel("times as fast as\nthe default plan")
    axes.grid(visible=True, axis="y")
