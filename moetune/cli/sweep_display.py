"""A sweep on the screen: a live table on a terminal, plain lines anywhere else. Both on stderr."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moetune.cli.output import console, out
from moetune.cli.results import amount, plain_table
from moetune.cli.space_lines import compiled_line, space_lines
from moetune.cli.sweep_progress import SweepProgress, TokenProgress, status_line
from moetune.engine.events import (
    CompileProgress,
    CountersStarted,
    Emit,
    Event,
    GapProbed,
    GpuAwaited,
    SpaceCompiled,
    SpaceReady,
    SweepStarted,
    TokenDone,
    TokenFailed,
    TokenRefused,
    Warned,
)
from moetune_kernels.table import UNIFORM, span_text

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_PER_S = 4
COMPILE_LINE_S = 10.0  # seconds between two lines about compiling, where lines stay


@contextmanager
def sweep_display() -> Iterator[Emit]:
    """Yield the function that takes a sweep's events."""
    if not sys.stderr.isatty():
        yield PlainLines(SweepProgress())
        return
    from rich.live import Live

    progress = SweepProgress()
    screen = console(to_stderr=True)
    with Live(
        console=screen, get_renderable=lambda: live_view(progress), refresh_per_second=REFRESH_PER_S, transient=True
    ):

        def on_event(event: Event) -> None:
            progress.update(event)
            said = headline(event)
            if said is not None:
                screen.print(said, soft_wrap=True)

        yield on_event


class PlainLines:
    """One line per thing that happened, for logs and pipes."""

    def __init__(self, progress: SweepProgress) -> None:
        self._progress = progress
        self._line_due_s = 0.0

    def __call__(self, event: Event) -> None:
        """Take one event and print its line, if it deserves one."""
        self._progress.update(event)
        said = headline(event)
        if said is not None:
            out.progress(said)
        match event:
            case CompileProgress(done=done, total=total) if self._is_worth_a_line(done, total):
                out.progress(status_line(self._progress))
            case TokenDone(entry=entry):
                row = self._progress.rows[entry.tokens]
                out.progress(
                    f"{span_text(entry.tokens, entry.tokens)}: {row_text(row)} · {status_line(self._progress)}"
                )
            case _:
                pass

    def _is_worth_a_line(self, done: int, total: int) -> bool:
        """Whether a compile step gets a line: the first and the last of the candidates, and one every ten seconds."""
        if self._progress.phase != "compiling":
            return False
        now_s = self._progress.clock()
        if 0 < done < total and now_s < self._line_due_s:
            return False
        self._line_due_s = now_s + COMPILE_LINE_S
        return True


def headline(event: Event) -> str | None:
    """Return the line that stays on the screen for ``event``, None for most events."""
    match event:
        case GpuAwaited(gpu=gpu, holder=holder):
            return f"waiting for {gpu}, which is in use by {holder}"
        case SweepStarted(backend=backend, device=device, shape=shape, store=store, resumed=resumed, routing=routing):
            known = f", {resumed} trials known from {store}" if resumed else ""
            routed = "" if routing == UNIFORM else f", {routing} routing"
            return f"{backend}: {shape.key} on {device.name}{routed}{known}"
        case SpaceReady():
            return "\n".join(space_lines(event))
        case SpaceCompiled():
            return compiled_line(event)
        case TokenFailed(tokens=tokens, reason=reason) | TokenRefused(tokens=tokens, reason=reason):
            return f"{span_text(tokens, tokens)}: no entry, {reason}"
        case GapProbed() | CountersStarted():
            return _afterwards(event)
        case Warned(text=text):
            return f"warning: {text}"
        case _:
            return None


def _afterwards(event: GapProbed | CountersStarted) -> str | None:
    """Return the line about what follows the last token count."""
    if isinstance(event, CountersStarted):
        return f"reading hardware counters of {event.entries} winners"
    if not event.is_tuned:
        return None
    said = f"{span_text(event.tokens, event.tokens)}: {event.loss:.1%} lost with the plan of {event.serving}"
    return f"{said}, so it becomes an entry"


def row_text(row: TokenProgress) -> str:
    """Return a finished token count in words."""
    entry = row.entry
    if entry is None:
        return row.failed or f"best so far {amount(row.layer_us)} us"
    default = "" if entry.baseline_us is None else f", {entry.baseline_us / entry.median_us:.2f}x the default's speed"
    return f"{amount(entry.median_us)} us{default}, {100 * entry.bound_us / entry.median_us:.0f}% of the bound"


def live_view(progress: SweepProgress) -> RenderableType:
    """Return the live picture: the status line over the best time of every token count."""
    from rich.console import Group
    from rich.text import Text

    shown = plain_table("tokens", "best us", "default us", "faster", "of bound", left=("state",))
    for row in list(progress.rows.values()):
        shown.add_row(*_cells(row, progress.current))
    return Group(Text(status_line(progress)), shown)


def _cells(row: TokenProgress, current: Collection[int]) -> tuple[str, ...]:
    entry, is_current = row.entry, row.tokens in current
    if entry is None:
        state = "failed" if row.failed else "measuring" if is_current else "waiting"
        return str(row.tokens), amount(row.layer_us), "", "", "", state
    faster = "" if entry.baseline_us is None else f"{entry.baseline_us / entry.median_us:.2f}x"
    bound = f"{100 * entry.bound_us / entry.median_us:.0f}%"
    return str(row.tokens), amount(entry.median_us), amount(entry.baseline_us), faster, bound, "done"
