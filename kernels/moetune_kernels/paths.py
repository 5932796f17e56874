"""Where tuned tables live on disk."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from moetune_kernels.errors import TableError

CONFIG_DIR_VARIABLE = "MOETUNE_CONFIG_DIR"
_PACKAGE_DIR = Path(__file__).resolve().parent


def shipped_tables_dir() -> Path:
    """Return the folder of shipped tables: inside the wheel, else the checkout's ``tuned_configs/``."""
    installed = _PACKAGE_DIR / "tuned_configs"
    checkout = _PACKAGE_DIR.parents[1] / "tuned_configs"
    return installed if installed.is_dir() else checkout


def user_tables_dir() -> Path:
    """Return the user's own folder, where ``moetune sweep`` writes: ``$XDG_DATA_HOME/moetune/tables``.

    Raises:
        TableError: the user has no home folder and XDG_DATA_HOME does not name one.
    """
    data_home = Path(os.environ.get("XDG_DATA_HOME", ""))
    if not data_home.is_absolute():  # the XDG rules say to ignore a relative path
        data_home = _home() / ".local" / "share"
    return data_home / "moetune" / "tables"


def search_dirs() -> tuple[Path, ...]:
    """Return the folders that the lookup reads, first one first: MOETUNE_CONFIG_DIR, the user's, the shipped ones."""
    folders: list[Path] = []
    named = os.environ.get(CONFIG_DIR_VARIABLE, "")
    if named:
        folders.append(Path(named))
    with suppress(TableError):  # no home: the others still serve
        folders.append(user_tables_dir())
    return (*folders, shipped_tables_dir())


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a container whose user has no passwd entry
        raise TableError(
            "the user has no home folder to keep tables in; set XDG_DATA_HOME or name a folder with --out"
        ) from None
