"""Draw a profile for a terminal: 80 columns are enough, and every value wears the letter of its source."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moetune.measure.parts import Part
from moetune.outcome import Figure, Source
from moetune.profiling.page import KernelFigures, KernelProfile, Kind, LayerProfile, TokenProfile

WIDTH = 80
LETTERS = {
    Source.COUNTER: "c",
    Source.EVENT: "e",
    Source.STATIC: "s",
    Source.ANALYTICAL: "a",
    Source.COMPOSED: "p",
}
LEGEND = "c hardware counter, e CUDA events, s static (code over time), a analytical (formula), p sum of parts, - none"
_NAMES = {
    Part.ROUTING: "routing",
    Part.COPY: "copy",
    Part.GATE_UP: "gate_up",
    Part.DOWN: "down",
    Part.COMBINE: "combine",
}


def render(profile: LayerProfile) -> RenderableType:
    """Return the page as one rich renderable that fits 80 columns."""
    parts: list[RenderableType] = [_head(profile)]
    for token_profile in profile.tokens:
        parts += [Text(), _token_head(token_profile), _table(token_profile), *_remarks(token_profile)]
    parts += [Text(), *_foot(profile)]
    return Group(*parts)


def as_text(profile: LayerProfile) -> str:
    """Return the page as plain text of 80 columns."""
    console = Console(width=WIDTH, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(render(profile))
    return captured.get()


def _head(profile: LayerProfile) -> Text:
    shape, device = profile.shape, profile.device
    head = Text()
    head.append(f"{device.name}", style="bold")
    head.append(
        f"  {device.sm_count} SMs, L2 {device.l2_bytes / 2**20:.0f} MiB" + (f", MIG {device.mig}" if device.mig else "")
    )
    head.append(
        f"\nhidden {shape.hidden}, intermediate {shape.inter}, {shape.local_experts} experts, top {shape.top_k}, "
        f"{shape.format.value}"
    )
    if not profile.measured:
        head.append("\nANALYTICAL: nothing on this page was measured", style="bold yellow")
    head.append(f"\n{_ceilings(profile)}", style="dim")
    head.append(f"\n{', '.join(f'{name} {version}' for name, version in profile.versions.items())}", style="dim")
    return head


def _ceilings(profile: LayerProfile) -> str:
    ceilings, lines = profile.ceilings, []
    for title, rate, flops in (
        ("data sheet", ceilings.nominal_bytes_per_s, ceilings.nominal_flops),
        ("measured", ceilings.measured_bytes_per_s, ceilings.measured_flops),
    ):
        if rate and flops:
            ridge = flops / rate
            lines.append(f"{title}: {rate / 1e12:.2f} TB/s, {flops / 1e12:.0f} TFLOP/s, ridge {ridge:.0f} FLOP/B")
    return "\n".join(lines)


def _token_head(profile: TokenProfile) -> Text:
    head = Text()
    plural = "" if profile.tokens == 1 else "s"
    head.append(f"{profile.tokens} token{plural}", style="bold")
    head.append(f"  {profile.touched_experts:.0f} experts touched, layer ")
    head.append_text(_cell(profile.layer_time_us, _time))
    head.append(", bound ")
    head.append_text(_cell(profile.bound_us, _time))
    head.append(f" by {profile.limit.value}")
    head.append(f"\n{profile.plan_source}", style="dim")
    return head


def _table(profile: TokenProfile) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for kernel in profile.kernels:
        table.add_column(_NAMES[kernel.part], justify="right", no_wrap=True)
    for title, pick, write in _ROWS:
        figures = [pick(kernel.figures) for kernel in profile.kernels]
        if any(figure.value is not None for figure in figures):
            table.add_row(title, *(_cell(figure, write) for figure in figures))
    table.add_row("limited by", *(Text(kernel.limit.value) for kernel in profile.kernels))
    for title, value in (("registers", lambda kernel: kernel.registers), ("spills", lambda kernel: kernel.spills)):
        if any(value(kernel) is not None for kernel in profile.kernels):
            table.add_row(title, *(_static(value(kernel)) for kernel in profile.kernels))
    return table


def _remarks(profile: TokenProfile) -> Iterator[RenderableType]:
    worth_saying = [kernel for kernel in profile.kernels if kernel.choice or kernel.verdict.kind is not Kind.UNTIMED]
    for kernel in worth_saying:
        yield Padding(_verdict(kernel), (0, 0, 0, 2))
    for note in profile.notes:
        yield Padding(Text(note, style="yellow"), (0, 0, 0, 2))


def _verdict(kernel: KernelProfile) -> Text:
    text = Text()
    text.append(f"{_NAMES[kernel.part]}: ", style="bold")
    if kernel.verdict.kind is not Kind.UNTIMED:
        text.append(f"{kernel.verdict.kind.value}: ", style="bold")
    text.append(f"{kernel.verdict.sentence}. Next: {kernel.verdict.action}.")
    if kernel.choice:
        text.append(f" [{kernel.choice}]", style="dim")
    if kernel.bytes_note:
        text.append(f" Bytes: {kernel.bytes_note}.")
    return text


def _foot(profile: LayerProfile) -> Iterator[RenderableType]:
    for note in profile.notes:
        yield Text(note, style="yellow")
    if profile.counters_missing is not None and profile.measured:
        yield Text(
            f"No hardware counters: {profile.counters_missing}. Figures marked s and a are estimates.", style="yellow"
        )
        if profile.counters_fixes:
            yield Text("To allow them:")
            for line in profile.counters_fixes:
                yield Padding(Text(line), (0, 0, 0, 2))
    yield Text(LEGEND, style="dim")
    yield Text(f"again: {profile.command}", style="dim")


def _cell(figure: Figure, write: Callable[[float], str]) -> Text:
    if figure.value is None:
        return Text("-", style="dim")
    text = Text(write(figure.value))
    text.append(f" {LETTERS[figure.source]}", style="dim")
    return text


def _static(value: int | None) -> Text:
    return Text("-", style="dim") if value is None else Text(f"{value}").append(" s", style="dim")


def _time(us: float) -> str:
    if us >= 1000:
        return f"{us / 1000:,.2f} ms"
    return f"{us:.1f} us" if us >= 10 else f"{us:.2f} us"


def _bytes(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def _rate(gbps: float) -> str:
    return f"{gbps:,.0f} GB/s"


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def _count(value: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.1f}{unit}"
    return f"{value:.0f}"


def _times(value: float) -> str:
    return f"{value:,.2f}"


_ROWS: tuple[tuple[str, Callable[[KernelFigures], Figure], Callable[[float], str]], ...] = (
    ("time", lambda figures: figures.time_us, _time),
    ("time by ncu", lambda figures: figures.ncu_time_us, _time),
    ("bound", lambda figures: figures.bound_us, _time),
    ("FLOP/byte", lambda figures: figures.flops_per_byte, _times),
    ("TFLOP/s", lambda figures: figures.tflops, _times),
    ("least bytes", lambda figures: figures.min_bytes, _bytes),
    ("DRAM bytes", lambda figures: figures.dram_bytes, _bytes),
    ("bandwidth", lambda figures: figures.bandwidth_gbps, _rate),
    (" of data sheet", lambda figures: figures.of_nominal, _share),
    (" of measured", lambda figures: figures.of_measured, _share),
    ("issue eff.", lambda figures: figures.issue_efficiency, _share),
    ("issue at bound", lambda figures: figures.issue_ceiling, _share),
    ("tensor pipe", lambda figures: figures.tensor_activity, _share),
    ("occupancy", lambda figures: figures.occupancy, _share),
    ("L2 bytes", lambda figures: figures.l2_bytes, _bytes),
    ("bank conflicts", lambda figures: figures.bank_conflicts, _count),
    ("tiles", lambda figures: figures.tiles, _count),
    ("waves", lambda figures: figures.waves, _times),
    ("padding", lambda figures: figures.padding, _times),
)
