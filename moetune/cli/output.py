"""The one sink of the command line: results go to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN_WIDTH = 80  # of a pipe or a file: tables keep to it, so that reports and mails do not wrap


class Output:
    """Where commands print. Streams are looked up at each call, so that a redirected one is honoured."""

    def result(self, text: str) -> None:
        """Print one line of result to stdout, unwrapped: paths and figures stay whole for scripts."""
        print(printable(text), file=sys.stdout, flush=True)  # noqa: T201 - this is the one place that prints

    def show(self, renderable: RenderableType) -> None:
        """Print a Rich table or text to stdout, in 80 columns where stdout is no terminal."""
        console(to_stderr=False).print(renderable)

    def progress(self, text: str) -> None:
        """Print one line of progress to stderr; a reader that left stops no sweep."""
        with suppress(OSError):
            print(printable(text), file=sys.stderr, flush=True)  # noqa: T201 - this is the one place that prints

    def note(self, text: str) -> None:
        """Say on stderr what was chosen and why."""
        self.progress(f"note: {text}")

    def error(self, text: str) -> None:
        """Say on stderr what went wrong, in one line."""
        self.progress(f"error: {' '.join(text.split())}")


out = Output()


def console(*, to_stderr: bool) -> Console:
    """Return a Rich console on the stream; text in brackets is text, never markup."""
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def printable(text: str) -> str:
    r"""Return ``text`` with control characters written out: a foreign file must not steer the terminal.

    >>> printable("a" + chr(27) + "[31m")
    'a\\x1b[31m'
    """
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)
