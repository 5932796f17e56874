"""One look for every chart: palette, fonts, and how a figure becomes a PNG file or an inline SVG.

Colours are Okabe and Ito's, told apart by the colour-blind; line styles and markers differ too. A PNG is always light.
An inline SVG carries each palette colour as a CSS variable, so that the page decides between light and dark.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moetune.reporting.wording import plain

INK, MUTED, GRID = "#1f2328", "#59636e", "#d8dee4"
TUNED, DEFAULT, BOUND = "#0072b2", "#d55e00", "#7a6652"
MEMORY, COMPUTE = "#0173b2", "#e69f01"
HOLLOW = "#fefefe"  # the page's own paper, inside hollow markers

# Each drawn colour, its CSS variable, and what it becomes on a dark page.
DARK = {
    INK: ("--ink", "#e6edf3"),
    MUTED: ("--muted", "#a0a9b3"),
    GRID: ("--grid", "#353c45"),
    TUNED: ("--tuned", "#56b4e9"),
    DEFAULT: ("--default", "#ff9a57"),
    BOUND: ("--bound", "#c9b79c"),
    MEMORY: ("--memory", "#56b3e8"),
    COMPUTE: ("--compute", "#f0bd45"),
    HOLLOW: ("--paper", "#16191d"),
}

DPI = 150  # sharp on a laptop screen, 100 to 200 kB a picture
WIDTH_IN = 7.6
MAX_TITLE = 84  # characters that fit the width
PNG_MARK = "moetune report"  # the Software field of every picture that we write

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # matplotlib ships it: the same picture on every machine
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "text.parse_math": False,  # a device called "$\\frac" is a name, not a formula
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "path",
    "svg.hashsalt": "moetune",
    "figure.facecolor": "none",
}


@contextmanager
def drawing() -> Iterator[None]:
    """Draw with our settings only, whatever matplotlibrc this machine has."""
    with mpl.rc_context():
        mpl.rcdefaults()
        for name, value in _STYLE.items():
            mpl.rcParams[name] = value  # pyright: ignore[reportArgumentType] - stubs list the names one by one
        yield


def new_figure(height_in: float, title: str) -> Figure:
    """Return an empty figure of the page's width, laid out so that nothing overlaps."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(plain(title, MAX_TITLE), x=0.01, ha="left", fontsize=10, fontweight="bold")
    return figure


def legend_above(axes: Axes, handles: Sequence[Artist], columns: int) -> None:
    """Put the legend between the title and the data, where it hides nothing."""
    axes.legend(
        handles=list(handles),
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncol=columns,
        borderaxespad=0.2,
        borderpad=0.2,
        handlelength=2.2,
        columnspacing=1.6,
    )


def png_bytes(figure: Figure) -> bytes:
    """Render on white. The same figure gives the same bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, facecolor="white", metadata={"Software": PNG_MARK})
    return out.getvalue()
