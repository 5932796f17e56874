"""The roofline: how fast each token count runs, beside the fastest that its FLOPs per byte allow."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from moetune.reporting.axis import log_scale
from moetune.reporting.facts import Point, Roof, Section
from moetune.reporting.labels import Spot, merge_close, place_labels
from moetune.reporting.theme import DEFAULT, GRID, HOLLOW, INK, MUTED, TUNED, legend_above, new_figure
from moetune.reporting.wording import number

_SAMPLES = 120  # boxes along a roof that labels keep away from


def draw_roofline(section: Section) -> Figure:
    """Draw useful TFLOP/s over FLOPs per byte, one point per token count; needs at least one point."""
    figure = new_figure(4.6, f"Roofline · {section.title}")
    axes = figure.subplots()
    roofs = [roof for roof in (section.measured, section.nominal) if roof is not None]
    _limit_axes(axes, section.points, roofs)
    axes.grid(visible=True)
    handles = _draw_roofs(axes, section) + _draw_points(axes, section.points)
    legend_above(axes, handles, columns=2)
    axes.set_xlabel("FLOPs per byte of DRAM traffic")
    axes.set_ylabel("useful TFLOP/s")
    figure.canvas.draw()  # constrained layout moves the axes; labels need the final place
    figure.set_layout_engine("none")
    spots = merge_close(axes, [Spot(point.intensity, point.tflops, str(point.tokens)) for point in section.points])
    markers = [point.counted for point in section.points if point.counted is not None]
    place_labels(axes, spots, [*_roof_boxes(axes, roofs), *(_marker_box(axes, *marker) for marker in markers)])
    return figure


def _limit_axes(axes: Axes, points: Sequence[Point], roofs: Sequence[Roof]) -> None:
    counted = [point.counted for point in points if point.counted is not None]
    xs = [point.intensity for point in points] + [intensity for intensity, _ in counted]
    ys = [point.tflops for point in points] + [tflops for _, tflops in counted]
    ridges = [roof.flops / roof.bytes_per_s for roof in roofs]
    peaks = [roof.flops * 1e-12 for roof in roofs]
    log_scale(axes, axes.xaxis, min(xs) / 2, max([*xs, *ridges]) * 2.5)
    log_scale(axes, axes.yaxis, min(ys) / 3, max([*ys, *peaks]) * 1.8)


def _draw_roofs(axes: Axes, section: Section) -> list[Line2D]:
    handles = []
    for roof, name, width, dashes in (
        (section.measured, "measured", 2.4, "solid"),
        (section.nominal, "nominal", 1.0, (0, (5, 3))),
    ):
        if roof is None:
            continue
        low, high = axes.get_xlim()
        ridge = roof.flops / roof.bytes_per_s
        xs = [low, ridge, high]
        ys = [low * roof.bytes_per_s * 1e-12, roof.flops * 1e-12, roof.flops * 1e-12]
        label = f"{name} roofs: {number(roof.bytes_per_s * 1e-12)} TB/s, {number(roof.flops * 1e-12)} TFLOP/s dense"
        colour = INK if name == "measured" else MUTED
        handles += axes.plot(xs, ys, color=colour, linewidth=width, linestyle=dashes, label=label, zorder=2)
    return handles


def _draw_points(axes: Axes, points: Sequence[Point]) -> list[Line2D]:
    """Hollow: the least bytes and the timed speed. Solid: both as counters saw them. A line joins the two of a count."""
    axes.plot([p.intensity for p in points], [p.tflops for p in points], color=GRID, linewidth=1.2, zorder=2.5)
    for point in points:
        if point.counted is not None:
            (x, y), colour = point.counted, DEFAULT
            axes.plot([x, point.intensity], [y, point.tflops], color=colour, linewidth=1.0, zorder=3)
    hollow = axes.plot(
        [p.intensity for p in points],
        [p.tflops for p in points],
        "o",
        markersize=6,
        markerfacecolor=HOLLOW,
        markeredgecolor=TUNED,
        markeredgewidth=1.6,
        zorder=4,
        label="tuned plan, least bytes (label: tokens)",
    )
    counted = [p.counted for p in points if p.counted is not None]
    if not counted:
        return hollow
    return hollow + axes.plot(
        [intensity for intensity, _ in counted],
        [tflops for _, tflops in counted],
        "D",
        markersize=5,
        color=DEFAULT,
        zorder=3.5,
        label="the same plan under hardware counters",
    )


def _roof_boxes(axes: Axes, roofs: Sequence[Roof]) -> list[Bbox]:
    low, high = axes.get_xlim()
    xs = [low * (high / low) ** (step / _SAMPLES) for step in range(_SAMPLES + 1)]
    return [
        _marker_box(axes, x, min(x * roof.bytes_per_s, roof.flops) * 1e-12, radius=3.0) for roof in roofs for x in xs
    ]


def _marker_box(axes: Axes, x: float, y: float, radius: float = 5.0) -> Bbox:
    px, py = axes.transData.transform((x, y))
    return Bbox.from_extents(px - radius, py - radius, px + radius, py + radius)
