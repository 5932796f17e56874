"""``moetune report``: pictures and one HTML page from tables and trials."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.options import given_path, named_paths, output_dir
from moetune.cli.output import out

PathsArg = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[PATH]...",
        parser=given_path,
        help="Tables (.json) or folders of them, trial stores and recordings; the newest when left out.",
    ),
]
OutOpt = Annotated[
    Path, typer.Option("--out", metavar="DIR", parser=given_path, help="Where the page and the pictures go.")
]


def report(paths: PathsArg = None, out_dir: OutOpt = Path("reports")) -> None:
    """Draw the roofline, time per token count and the config heatmap, and write one self-contained page.

    Example: moetune report --out reports
    """
    os.environ["MPLBACKEND"] = "agg"  # no window is opened here, and a name that is not known would stop the import
    from moetune.reporting import build_report

    output_dir(out_dir)
    tables, stores = _split(paths or [])
    made = build_report(tables, stores, out_dir)
    for note in made.notes:
        out.note(note)
    for path in (*made.images, made.page):
        out.result(str(path))


def _split(paths: list[Path]) -> tuple[list[Path], list[Path]]:
    """Sort the given paths into tables and trial stores; two empty lists mean the newest ones."""
    named_paths(paths, "a table, a folder of tables or a trial store")
    tables = [path for path in paths if path.is_dir() or path.suffix == ".json"]
    return tables, [path for path in paths if path not in tables]
