"""``moetune check``: read tuned tables as the runtime would, and list every fault."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.options import given_path, named_paths
from moetune.cli.output import out
from moetune.errors import RunError

PathsArg = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[PATH]...",
        parser=given_path,
        help="Tables, or folders of tables; the shipped ones and yours when left out.",
    ),
]


def check(paths: PathsArg = None) -> None:
    """Validate tuned tables; faults are listed and the exit code is 1.

    Example: moetune check tuned_configs
    """
    from moetune.tables.check import check_path

    chosen = named_paths(paths or default_dirs(), "a table or a folder of tables")
    faults = [fault for path in chosen for fault in check_path(path)]
    for fault in faults:
        out.result(fault)
    if faults:
        raise RunError(f"{len(faults)} fault{'s' * (len(faults) > 1)} found")
    out.result(f"no faults in {', '.join(map(str, chosen))}" if chosen else "no tables to check")


def default_dirs() -> list[Path]:
    """Return the folders that hold tables, of the shipped ones and the user's own."""
    from moetune_kernels.paths import shipped_tables_dir, user_tables_dir

    return [folder for folder in (shipped_tables_dir(), user_tables_dir()) if any(folder.glob("*/*.json"))]
