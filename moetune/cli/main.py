"""Assembles the commands, and is the only place that catches their errors."""

from __future__ import annotations

import io
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
from moetune.cli.sweep import sweep
from moetune.errors import MissingError
from moetune_kernels import __version__

TERMINATED = 128 + signal.SIGTERM

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
app.command()(check)
app.command()(doctor)


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
        return fail(error)
    if code == INTERRUPTED:
        out.error("interrupted; a sweep keeps the trials that had ended, and the same command continues from them")
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path with odd bytes, a terminal without UTF-8
    # Unwind as Ctrl-C does: worker processes end, the store closes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    sys.exit(run(sys.argv[1:]))
