"""Axes that read in plain numbers: log axes without exponents, and token counts that never collide."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from moetune.reporting.wording import tick

MAX_LABELLED_BARS = 24  # more bars than this leave no room for a text on each
_DIGIT_IN = 0.0707  # width of a digit at the tick labels' size, in inches
_AXES_IN = 6.6  # width of an axis on a picture
MIN_SPAN = 12.0  # a log axis of less than a decade has too few round numbers to read


def log_scale(axes: Axes, axis: Axis, low: float, high: float) -> None:
    """Make one axis logarithmic from ``low`` to ``high``, labelled in plain numbers."""
    widen = max(1.0, math.sqrt(MIN_SPAN / (high / low)))
    low, high = low / widen, high * widen
    is_x = axis is axes.xaxis
    (axes.set_xscale if is_x else axes.set_yscale)("log")
    (axes.set_xlim if is_x else axes.set_ylim)(low, high)
    axis.set_major_locator(FixedLocator(_decade_ticks(low, high)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))


def token_scale(axes: Axes, tokens: Sequence[int]) -> None:
    """Make x logarithmic in tokens: a label at each power of two or four, a small tick at each count that was tuned."""
    low, high = min(tokens), max(tokens)
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / 1.3, high * 1.3)
    octaves = math.log2(max(high / low, 2))
    step = max(1, math.ceil(octaves / 16))
    first = math.ceil(math.log2(low))
    ticks = [2**power for power in range(first, math.floor(math.log2(high)) + 1, step)] or [low]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(FixedLocator(sorted(set(tokens) - set(ticks))))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens in the batch")


def token_categories(axes: Axes, tokens: Sequence[int]) -> list[int]:
    """Give every token count the same width; returns the x position of each."""
    positions = list(range(len(tokens)))
    every = _label_step(tokens)
    axes.set_xticks(positions[::every], [str(count) for count in tokens[::every]])
    axes.tick_params(axis="x", length=0, labelsize=8)
    middle, half = (len(tokens) - 1) / 2, max(len(tokens), 4) / 2 + 0.1  # a lone bar is no wall
    axes.set_xlim(middle - half, middle + half)
    axes.set_xlabel("tokens in the batch")
    return positions


def _label_step(tokens: Sequence[int]) -> int:
    """Return the smallest n such that a label at every nth bar touches none beside it."""
    widths = [len(str(count)) * _DIGIT_IN for count in tokens]
    for step in range(1, len(tokens)):
        shown = widths[::step]
        gap = 0.02 if step == 1 else 0.12  # every bar labelled is worth a tight fit
        room = _AXES_IN / len(tokens) * step - gap
        if all((one + other) / 2 <= room for one, other in itertools.pairwise(shown)):
            return step
    return max(1, len(tokens) - 1)


def _decade_ticks(low: float, high: float) -> list[float]:
    decades = math.log10(high / low)
    steps: tuple[int, ...] = (1, 2, 5) if decades <= 2.5 else (1, 3) if decades <= 3.5 else (1,)
    every = max(1, round(decades / 8))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1, every)
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
