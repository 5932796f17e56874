"""Assembles the commands, and is the only place that catches their errors."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from moetune.cli.check import check
from moetune.cli.doctor import doctor
from moetune.cli.failure import INTERRUPTED, USAGE, fail
from moetune.cli.output import out
from moetune.cli.profile import profile
from moetune.cli.report import report
from moetune.cli.strategies import app as strategies
from moetune.cli.sweep import sweep
from moetune.cli.trials import trials
from moetune.errors import MissingError
from moetune_kernels import __version__

ENDING_SIGNALS = ("SIGTERM", "SIGHUP")  # by name: Windows, which gets its one sentence, has no SIGHUP
SIGNALLED = 128  # plus the signal: what a shell makes of it

ABOUT = "Find the fastest correct way to run a Mixture-of-Experts layer on this GPU, and see where its time goes."
CODES = "Exit codes: 0 done, 1 failed while running, 2 bad usage or input, 3 this machine lacks something, 130 Ctrl-C."

app = typer.Typer(
    name="moetune",
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(sweep)
app.command()(profile)
app.command()(report)
app.command()(trials)
app.command()(check)
app.command()(doctor)
app.add_typer(strategies, name="strategies")


@app.callback(help=ABOUT, epilog=CODES, invoke_without_command=True)
def moetune(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Print the version, or the help page where no command was named."""
    if version:
        out.result(f"moetune {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        out.result(context.get_help())
        raise typer.Exit(USAGE)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; no error leaves as a traceback."""
    if sys.platform != "linux":
        return fail(
            MissingError(f"moetune runs on Linux only (Triton has no other builds), and this is {sys.platform}")
        )
    try:
        code = app(args=list(arguments), prog_name="moetune", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the one place: everything becomes a sentence and an exit code
        return fail(error, arguments)
    if code == INTERRUPTED:
        kept = "; the trials that had ended are kept, and the same command continues from them"
        out.error("interrupted" + (kept if arguments[:1] == ["sweep"] else ""))
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path with odd bytes, a terminal without UTF-8
    for name in ENDING_SIGNALS:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup keeps its word
            signal.signal(number, _unwind)
    sys.exit(run(sys.argv[1:]))


def _unwind(number: int, _frame: object) -> NoReturn:
    """End as Ctrl-C does: worker processes end, the store closes."""
    sys.exit(SIGNALLED + number)


def _open_closed_streams() -> None:
    """Give a stream that the caller closed (``>&-``) the null device: a file opened later must not take its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")
