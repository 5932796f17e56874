"""Put text beside points so that no text covers another text, a point or a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

from moetune.reporting.theme import INK, MUTED

MERGE_PX = 11.0  # points closer than a marker's width share one label
CLEARANCE_PX = 2.0
_OUTSIDE_COST = 1e6  # more than any overlap, in square pixels
# Right under the roofs first: a roofline's points have free space below and to the right.
_DIRECTIONS = ((1, -1), (1, 0), (0, -1), (-1, 1), (0, 1), (1, 1), (-1, 0), (-1, -1))
_DISTANCES_PX = (9.0, 16.0, 26.0, 38.0, 54.0, 72.0)


@dataclass(frozen=True, slots=True)
class Spot:
    """A point in data coordinates, and what to call it."""

    x: float
    y: float
    text: str


def merge_close(axes: Axes, spots: Sequence[Spot]) -> list[Spot]:
    """Join neighbours that would print on top of each other; ``1``, ``2``, ``4`` become ``1–4``."""
    groups: list[list[Spot]] = []
    for spot in spots:
        if groups and _apart(axes, groups[-1][-1], spot) < MERGE_PX:
            groups[-1].append(spot)
        else:
            groups.append([spot])
    return [Spot(group[-1].x, group[-1].y, _joined(group)) for group in groups]


def place_labels(axes: Axes, spots: Sequence[Spot], obstacles: Sequence[Bbox], size: float = 8.0) -> None:
    """Write each spot's text at the nearest free place, with a thin line back to the point when it is far.

    Args:
        axes: final limits and layout; labels do not change them.
        spots: what to label; each is an obstacle to the others' labels as well.
        obstacles: boxes in display pixels that must stay free.
        size: font size in points.
    """
    canvas = axes.figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    points_per_px = 72.0 / axes.figure.dpi
    taken = [*obstacles, *(_around(axes, spot) for spot in spots)]
    frame = axes.get_window_extent(canvas.get_renderer())
    for spot in spots:
        label = axes.annotate(
            spot.text,
            (spot.x, spot.y),
            xytext=(0, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=size,
        )
        extent = label.get_window_extent(canvas.get_renderer())
        label.remove()
        offset, distance = _free_offset(extent, taken, frame)
        taken.append(_moved(extent, offset))
        far = distance > _DISTANCES_PX[0]
        axes.annotate(
            spot.text,
            (spot.x, spot.y),
            xytext=(offset[0] * points_per_px, offset[1] * points_per_px),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=size,
            color=INK,
            arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
            if far
            else None,
        )


def _free_offset(extent: Bbox, taken: Sequence[Bbox], frame: Bbox) -> tuple[tuple[float, float], float]:
    """Return the nearest free place as (offset, distance) in pixels; the least bad one when none is free."""
    best: tuple[float, tuple[float, float], float] | None = None
    for distance in _DISTANCES_PX:
        for right, up in _DIRECTIONS:
            beside = right * (distance + extent.width / 2)
            above = up * (distance if right else distance + extent.height / 2)
            box = _moved(extent, (beside, above))
            cost = sum(_overlap(box, other) for other in taken) + (0 if _inside(box, frame) else _OUTSIDE_COST)
            if best is None or cost < best[0]:
                best = (cost, (beside, above), distance)
            if cost == 0:
                return best[1], best[2]
    assert best is not None
    return best[1], best[2]


def _apart(axes: Axes, one: Spot, other: Spot) -> float:
    (x0, y0), (x1, y1) = axes.transData.transform([(one.x, one.y), (other.x, other.y)])
    return math.hypot(x1 - x0, y1 - y0)


def _joined(group: Sequence[Spot]) -> str:
    return group[0].text if len(group) == 1 else f"{group[0].text}–{group[-1].text}"


def _around(axes: Axes, spot: Spot) -> Bbox:
    x, y = axes.transData.transform((spot.x, spot.y))
    return Bbox.from_extents(x - 5, y - 5, x + 5, y + 5)


def _moved(extent: Bbox, offset: tuple[float, float]) -> Bbox:
    moved = extent.translated(*offset)
    return moved.padded(CLEARANCE_PX)


def _inside(box: Bbox, frame: Bbox) -> bool:
    return frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1


def _overlap(one: Bbox, other: Bbox) -> float:
    both = Bbox.intersection(one, other)
    return 0.0 if both is None else both.width * both.height
