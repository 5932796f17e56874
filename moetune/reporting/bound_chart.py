"""How close each token count comes to the physical bound, and which ceiling that bound is."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moetune.models.roofline import Limit
from moetune.reporting.axis import MAX_LABELLED_BARS, token_categories
from moetune.reporting.facts import Point, Section
from moetune.reporting.theme import BOUND, COMPUTE, HOLLOW, INK, MEMORY, legend_above, new_figure

_COLOURS = {Limit.MEMORY: MEMORY, Limit.COMPUTE: COMPUTE}
_HATCHES = {Limit.MEMORY: "", Limit.COMPUTE: "////"}  # told apart without colour


def bounded_points(section: Section) -> list[Point]:
    """Return the points that have a bound and a ceiling that it comes from."""
    return [point for point in section.points if point.bound_share is not None and point.limit is not None]


def draw_bound_shares(section: Section) -> Figure:
    """Draw the bound over the time of each token count, in percent; needs one of :func:`bounded_points`."""
    points = bounded_points(section)
    figure = new_figure(3.4, f"Share of the physical bound · {section.title}")
    axes = figure.subplots()
    xs = token_categories(axes, [point.tokens for point in points])
    handles = [*_draw_bars(axes, xs, points), *_draw_default(axes, xs, points)]
    axes.axhline(100, color=BOUND, linewidth=1.4, linestyle="dashed")
    axes.set_ylabel("bound ÷ time, %")
    axes.grid(visible=True, axis="y")
    legend_above(axes, handles, columns=3)
    return figure


def _draw_bars(axes: Axes, xs: Sequence[int], points: Sequence[Point]) -> list[Patch]:
    shares = [100 * (point.bound_share or 0.0) for point in points]
    for x, share, point in zip(xs, shares, points, strict=True):
        limit = point.limit or Limit.MEMORY
        axes.bar(x, share, 0.72, color=_COLOURS[limit], hatch=_HATCHES[limit], edgecolor=HOLLOW, linewidth=0)
        if len(points) <= MAX_LABELLED_BARS:
            axes.text(x, max(share, 101) + 1.5, f"{share:.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, max(114, max(shares) * 1.15))
    return [
        Patch(
            facecolor=_COLOURS[limit],
            hatch=_HATCHES[limit],
            edgecolor=HOLLOW,
            linewidth=0,
            label=f"limited by {limit.value}",
        )
        for limit in Limit
        if any(point.limit is limit for point in points)
    ]


def _draw_default(axes: Axes, xs: Sequence[int], points: Sequence[Point]) -> list[Line2D]:
    shares = [
        (x, 100 * point.bound_us / point.baseline_us)
        for x, point in zip(xs, points, strict=True)
        if point.bound_us is not None and point.baseline_us is not None
    ]
    if not shares:
        return []
    positions, values = zip(*shares, strict=True)
    return axes.plot(positions, values, "_", color=INK, markersize=11, markeredgewidth=1.8, label="default plan")
