"""From files to files: find tables and trials, draw, and publish pictures and page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from moetune.errors import MissingError
from moetune.reporting.assemble import assemble
from moetune.reporting.bound_chart import bounded_points, draw_bound_shares
from moetune.reporting.facts import Section
from moetune.reporting.heat_grid import HeatGrid, heat_grids
from moetune.reporting.heatmap import draw_heatmap
from moetune.reporting.page import PageSection, Picture, render_page
from moetune.reporting.publish import publish
from moetune.reporting.roofline import draw_roofline
from moetune.reporting.svg import inline_svg
from moetune.reporting.tables import find_tables
from moetune.reporting.theme import drawing, png_bytes
from moetune.reporting.time_chart import draw_times
from moetune.reporting.trials import find_trials, stores_to_read
from moetune_kernels.config import Role

PAGE_NAME = "report.html"
MAX_PAGE_BYTES = 3_000_000
PICTURE_BUDGET_BYTES = 2_200_000  # of inline pictures; the rest is for the tables' texts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResult:
    """What was written, and sentences on what could not be shown."""

    page: Path
    images: tuple[Path, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chart:
    kind: str
    title: str
    caption: str
    draw: Callable[[], Figure]


def build_report(tables: Sequence[Path], stores: Sequence[Path], out_dir: Path) -> ReportResult:
    """Draw every table that can be read and write one self-contained page beside the pictures.

    Args:
        tables: table files or folders; empty means the user's tables, else the shipped ones.
        stores: trial stores or recordings; empty means the default store. Without trials of a table, its shipped
            recording serves.
        out_dir: made if it is not there. Names are the same every time; only files of earlier reports are replaced.

    Raises:
        MissingError: no table can be read.
        UsageError: a name in ``out_dir`` is taken by a file that no report wrote.
        RunError: a file cannot be written.
    """
    found = find_tables(tables)
    notes = list(found.notes)
    if not found.tables:
        raise MissingError(_nothing_to_show(tables, notes))
    readable = stores_to_read(stores, notes)
    taken: set[str] = set()
    sections: list[PageSection] = []
    images: list[Path] = []
    left_bytes = PICTURE_BUDGET_BYTES
    for located in found.tables:
        section = assemble(located, find_trials(located.table, readable, notes), taken)
        sections.append(_illustrate(section, out_dir, left_bytes))
        images += [out_dir / picture.file for picture in sections[-1].pictures]
        left_bytes -= sum(map(_size, sections[-1].pictures))
    page = _fitting_page(sections, notes, _own_command(tables, stores, out_dir))
    return ReportResult(page=publish(out_dir / PAGE_NAME, page), images=tuple(images), notes=tuple(notes))


def _fitting_page(sections: list[PageSection], notes: list[str], command: str) -> bytes:
    """Render the page; where huge tables make it too large, the oldest go, and a note says so."""
    page = _page_bytes(sections, notes, command)
    while len(page) > MAX_PAGE_BYTES and len(sections) > 1:
        left_out = sections.pop().section
        notes.append(f"{left_out.path}: its section is left out, the page would be too large; name it alone to see it")
        page = _page_bytes(sections, notes, command)
    return page


def _page_bytes(sections: list[PageSection], notes: list[str], command: str) -> bytes:
    """Render the page; bytes of a path that are no text are written out."""
    return render_page(sections, notes, command).encode("utf-8", "backslashreplace")


def _illustrate(section: Section, out_dir: Path, left_bytes: int) -> PageSection:
    """Draw a section's charts and publish each as a PNG; inline them as far as ``left_bytes`` go."""
    grids = _grids(section)
    pictures: list[Picture] = []
    for chart in _charts(section, grids):
        with drawing():
            figure = chart.draw()
            png = png_bytes(figure)
            svg = inline_svg(figure, f"{section.name}-{chart.kind}".replace(".", "-"))
        file = f"report_{section.name}_{chart.kind}.png"
        publish(out_dir / file, png)
        fits = len(svg.markup) <= left_bytes
        pictures.append(Picture(title=chart.title, caption=chart.caption, file=file, svg=svg if fits else None))
        left_bytes -= _size(pictures[-1])
    return PageSection(section=section, pictures=pictures, grids=grids)


def _charts(section: Section, grids: Sequence[HeatGrid]) -> Iterator[_Chart]:
    points = section.points
    if points:
        yield _Chart(
            kind="roofline",
            title="Roofline",
            caption="Hollow: as timed, each touched weight moved once. Solid, where there are counters: bytes and speed of "
            "the launches that were counted, of other random rows; further left is traffic beyond the least, or more "
            "experts touched.",
            draw=lambda: draw_roofline(section),
        )
        yield _Chart(
            kind="times",
            title="Time per token count",
            caption="One layer, logits to output, with a cold L2. Below: how many times as fast as the default plan.",
            draw=lambda: draw_times(section),
        )
    if bounded_points(section):
        yield _Chart(
            kind="bound",
            title="Share of the physical bound",
            caption="100 % is as fast as the ceilings reached allow, each expert that the timed rows touched read once. "
            "The ceilings are speeds that this run reached; a layer a little over 100 % streamed faster than that.",
            draw=lambda: draw_bound_shares(section),
        )
    if grids and section.trials is not None:
        yield _Chart(
            kind="heatmap",
            title="Config heatmap",
            caption="The best time of each tile size over the best of all, other choices (warps, prefetch depth, "
            f"structure) at their best. From {section.trials.origin}.",
            draw=lambda: draw_heatmap(section, grids),
        )


def _grids(section: Section) -> list[HeatGrid]:
    if section.trials is None:
        return []
    return [grid for role in Role for grid in heat_grids(section.trials.trials, role)]


def _size(picture: Picture) -> int:
    return 0 if picture.svg is None else len(picture.svg.markup)


def _own_command(tables: Sequence[Path], stores: Sequence[Path], out_dir: Path) -> str:
    return shlex.join(["moetune", "report", *map(str, (*tables, *stores)), "--out", str(out_dir)])


def _nothing_to_show(given: Sequence[Path], notes: Sequence[str]) -> str:
    where = ", ".join(map(str, given)) if given else "MOETUNE_CONFIG_DIR, your own tables or the shipped ones"
    because = f" ({notes[0]})" if notes else ""
    return f"there is no tuned table to show in {where}{because}; make one with `moetune sweep`, or name one: `moetune report TABLE.json`"
