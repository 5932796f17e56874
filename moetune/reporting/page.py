"""The page: sections as texts, and the template that lays them out.

Every foreign text passes through jinja2's escaping; the only markup that is trusted is our own SVG, whose texts are
outlines. A content security policy in the page forbids scripts and any address beside that.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import geometric_mean

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from moetune.models.catalogue import models_of
from moetune.outcome import Compiled, Figure, Source
from moetune.reporting.facts import Point, Section, compile_key
from moetune.reporting.heat_grid import HeatGrid
from moetune.reporting.svg import InlineSvg, glyph_sheet
from moetune.reporting.theme import DARK, PNG_MARK
from moetune.reporting.wording import counted, gib, kib, micros, moment, number, percent, ratio, short
from moetune_kernels import __version__
from moetune_kernels.config import MoEKernelConfig, Role

MAX_FAULTS = 20  # of one table; `moetune check` lists the rest
MAX_NOTES = 40

BACKENDS = {
    "cuda": "measured on the GPU named here (backend cuda)",
    "replay": "replayed from recorded trials: nothing ran on a GPU for this table (backend replay)",
    "offline": "compiled without a GPU: times are a model's, not measured (backend offline)",
}
_ROLES = {Role.GATE_UP: "gate-up", Role.DOWN: "down"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One chart of a section. ``svg`` is None where the page had no room for it; the PNG is there all the same."""

    title: str
    caption: str
    file: str
    svg: InlineSvg | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """A section with its charts."""

    section: Section
    pictures: Sequence[Picture]
    grids: Sequence[HeatGrid]


def render_page(sections: Sequence[PageSection], notes: Sequence[str], command: str) -> str:
    """Return the whole HTML page."""
    pictures = [picture.svg for one in sections for picture in one.pictures if picture.svg is not None]
    return _template().render(
        mark=PNG_MARK,
        version=__version__,
        light=[(variable, colour) for colour, (variable, _) in DARK.items()],
        dark=[(variable, colour) for variable, colour in DARK.values()],
        glyphs=Markup(glyph_sheet(pictures)),  # noqa: S704 - our own outlines
        sections=[_view(one, command) for one in sections],
        notes=[short(note) for note in notes[:MAX_NOTES]],
        more_notes=max(0, len(notes) - MAX_NOTES),
    )


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja")


def _view(one: PageSection, command: str) -> Mapping[str, object]:
    section = one.section
    return {
        "id": section.name,
        "device": section.device.name,
        "shape": section.shape.key,
        "models": ", ".join(model.name for model in models_of(section.shape.key)),
        "backend": BACKENDS.get(section.backend, section.backend),
        "measured": section.backend == "cuda",
        "count": len(section.points),
        "measured_at": moment(section.measured_at),
        "card": _card(section),
        "summary": _summary(section),
        "faults": [short(fault) for fault in section.faults[:MAX_FAULTS]],
        "more_faults": max(0, len(section.faults) - MAX_FAULTS),
        "times": [_time_row(point) for point in section.points],
        "figures": [_figure_row(section, point) for point in section.points],
        "reasons": sorted({reason for point in section.points for reason in _reasons(point)}),
        "plans": _plan_rows(section),
        "heat": [_heat_row(grid) for grid in one.grids],
        "pictures": [_picture(picture) for picture in one.pictures],
        "commands": _commands(section, command),
    }


def _picture(picture: Picture) -> Mapping[str, object]:
    svg = None if picture.svg is None else Markup(picture.svg.markup)  # noqa: S704 - our own drawing
    return {"title": picture.title, "caption": picture.caption, "file": picture.file, "svg": svg}


def _card(section: Section) -> list[tuple[str, str]]:
    device, shape = section.device, section.shape
    measured, nominal = section.measured, section.nominal
    rows = [
        ("GPU", device.name if device.mig is None else f"{device.name}, MIG {device.mig}"),
        ("Compute capability", f"{device.sm // 10}.{device.sm % 10}" if not device.is_amd else f"gfx{device.sm}"),
        ("SMs", f"{device.sm_count:,}"),
        ("Memory, L2", f"{gib(device.memory_bytes)}, {gib(device.l2_bytes)}"),
        ("Shared memory per block", f"{kib(device.smem_limit)} KiB"),
        (
            "Layer",
            f"H {shape.hidden:,}, I {shape.inter:,}, {counted(shape.local_experts, 'expert')}, top {shape.top_k}",
        ),
        ("Weights, activation", f"{shape.format.value}, {shape.activation.value}"),
        ("Routing", short(section.routing)),
        ("Driver", section.driver),
        ("torch, triton", f"{section.torch}, {section.triton}"),
        ("Kernels", f"{section.kernels_version}, {section.kernels_sha256[:12]}"),
        ("Measured at", moment(section.measured_at)),
    ]
    if measured is not None:
        rows.append(
            (
                "Ceilings reached",
                f"{number(measured.bytes_per_s * 1e-12)} TB/s, {number(measured.flops * 1e-12)} TFLOP/s",
            )
        )
    if nominal is not None:
        rows.append(
            ("Data sheet", f"{number(nominal.bytes_per_s * 1e-12)} TB/s, {number(nominal.flops * 1e-12)} TFLOP/s")
        )
    return [(name, short(value, 200)) for name, value in rows]


def _summary(section: Section) -> list[str]:
    points = section.points
    if not points:
        return ["This table has no entry that can be read: the runtime uses its default plan."]
    said = [f"Tuned for {counted(len(points), 'token count')}, {points[0].tokens:,} to {points[-1].tokens:,}."]
    speedups = [point.speedup for point in points if point.speedup is not None]
    if speedups:
        said.append(
            f"{ratio(min(speedups))} to {ratio(max(speedups))} as fast as the default plan, "
            f"{ratio(geometric_mean(speedups))} in the geometric mean."
        )
    shares = [(point.bound_share, point) for point in points if point.bound_share is not None]
    if shares:
        best, worst = max(shares, key=lambda one: one[0]), min(shares, key=lambda one: one[0])
        said.append(
            f"Nearest to the physical bound at {counted(best[1].tokens, 'token')} ({percent(best[0])} of it), "
            f"farthest at {counted(worst[1].tokens, 'token')} ({percent(worst[0])})."
        )
    return said


def _time_row(point: Point) -> Mapping[str, str]:
    low, high = point.serves
    return {
        "tokens": f"{point.tokens:,}",
        "serves": f"{low:,}" if low == high else f"{low:,}–{high:,}",
        "median": micros(point.median_us),
        "spread": micros(point.spread_us),
        "baseline": micros(point.baseline_us),
        "speedup": ratio(point.speedup),
        "bound": micros(point.bound_us),
        "share": percent(point.bound_share),
        "verdict": point.verdict(),
    }


def _figure_row(section: Section, point: Point) -> Mapping[str, object]:
    roof, bandwidth = section.measured, point.bandwidth_gbps
    share = None if roof is None or bandwidth.value is None else bandwidth.value * 1e9 / roof.bytes_per_s
    return {
        "tokens": f"{point.tokens:,}",
        "formula": number(point.intensity),
        "tflops": number(point.tflops),
        "compute_share": percent(None if roof is None else point.tflops * 1e12 / roof.flops),
        "flops_per_byte": _figure(point.flops_per_byte),
        "bandwidth": _figure(bandwidth),
        "bandwidth_share": percent(share),
        "issue": _figure(point.issue_efficiency, of_one=True),
    }


def _figure(figure: Figure, *, of_one: bool = False) -> tuple[str, str]:
    """Return the value and its source; shares are shown in percent."""
    value = figure.value
    return (percent(value) if of_one else number(value)), figure.source.value


def _reasons(point: Point) -> list[str]:
    figures = (
        ("FLOPs/byte", point.flops_per_byte),
        ("bandwidth", point.bandwidth_gbps),
        ("issue efficiency", point.issue_efficiency),
    )
    return [
        short(f"{name}: {figure.reason}")
        for name, figure in figures
        if figure.source is Source.UNAVAILABLE and figure.reason
    ]


def _plan_rows(section: Section) -> list[Mapping[str, object]]:
    compiled = {} if section.trials is None else section.trials.compiled()
    return [
        {"tokens": f"{point.tokens:,}", "first": role is Role.GATE_UP}
        | _config_cells(role, point.plan.config(role), compiled.get((role, compile_key(point.plan.config(role)))))
        for point in section.points
        for role in Role
    ]


def _config_cells(role: Role, config: MoEKernelConfig, compiled: Compiled | None) -> dict[str, object]:
    cap = "" if config.max_registers is None else f" (cap {config.max_registers})"
    used = "not known" if compiled is None else f"{compiled.registers:,}"
    return {
        "role": _ROLES[role],
        "structure": config.structure.value,
        "tile": f"{config.block_m} × {config.block_n} × {config.block_k}",
        "group_m": str(config.group_m),
        "warps": str(config.num_warps),
        "threads": str(config.block_size if compiled is None else compiled.block_size),
        "prefetch": str(config.prefetch_distance),
        "registers": used + cap,
        "spills": "not known" if compiled is None else f"{compiled.spills:,}",
        "smem": kib(config.smem_size if compiled is None else compiled.smem_bytes),
    }


def _heat_row(grid: HeatGrid) -> Mapping[str, object]:
    kinds = ", ".join(f"{count} {kind.value}" for kind, count in grid.failures.most_common()) or "none"
    return {
        "role": _ROLES[grid.role],
        "tokens": f"{grid.tokens:,}",
        "timed": f"{grid.measured:,}",
        "best": micros(grid.best_us),
        "failed": kinds,
        "reasons": [
            f"{count:,} × {kind.value}{': ' if count == 1 else ', such as: '}{short(reason, 160)}"
            for kind, reason, count in grid.reasons
        ],
    }


def _commands(section: Section, command: str) -> list[tuple[str, str]]:
    shape = section.shape
    layer = f"--hidden {shape.hidden} --inter {shape.inter} --experts {shape.local_experts} --top-k {shape.top_k}"
    return [
        ("The table, as it was made", short(section.command, 1000)),
        ("Counters or estimates per kernel", f"moetune profile {layer} --format {shape.format.value}"),
        ("The table's faults, if any", f"moetune check {shlex.quote(section.path)}"),
        ("This page", command),
    ]
