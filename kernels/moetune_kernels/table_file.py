"""Reading table files from disk: bounded, never blocking, and every failure one TableError."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from moetune_kernels.device import DeviceInfo
from moetune_kernels.errors import TableError
from moetune_kernels.shape import MoEShape
from moetune_kernels.table import MAX_TABLE_BYTES, TableKey, TunedTable, parse_key

MAX_FILES = 4096  # per folder that is searched: a forward must not walk a whole disk


@dataclass(frozen=True, slots=True)
class Found:
    """One file of a searched folder: what it is looked up by, or why it cannot be."""

    path: Path
    key: TableKey | None
    fault: str | None


def table_path(folder: Path, device: DeviceInfo, shape: MoEShape) -> Path:
    """Return where a table belongs under ``folder``: ``<device slug>/<shape key>.json``."""
    return folder / device.slug / f"{shape.key}.json"


def read_table(path: Path) -> TunedTable:
    """Read one table; raises TableError with the path, the reason and the fix."""
    return TunedTable.parse(read_bytes(path), str(path))


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a regular file of bounded size; raises TableError for anything else, without blocking."""
    try:
        # Not blocking, or a named pipe in the folder would hold the first forward for ever.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise TableError(f"{path}: is not a regular file; remove it or name it differently")
            if status.st_size > MAX_TABLE_BYTES:
                raise TableError(
                    f"{path}: holds {status.st_size:,} B, a table at most {MAX_TABLE_BYTES:,} B; remove the file"
                )
            return file.read(MAX_TABLE_BYTES + 1)
    except IsADirectoryError:
        raise TableError(f"{path}: is a folder, not a table; remove it or name it differently") from None
    except OSError as error:
        raise TableError(f"{path}: cannot be read ({error.strerror or error}); mend its permissions") from None


def scan(folder: Path) -> Iterator[Found]:
    """Yield every ``*.json`` of ``folder`` and its direct subfolders by path, parsed as far as the lookup compares.

    Raises:
        TableError: the folder exists but cannot be listed, or holds more than MAX_FILES files.
    """
    for path in json_files(folder):
        try:
            yield Found(path, parse_key(read_bytes(path), str(path)), None)
        except TableError as error:
            yield Found(path, None, str(error))


def is_folder(path: Path) -> bool:
    """Say whether ``path`` is a folder that may be looked into; never raises."""
    try:
        return path.is_dir()
    except OSError:
        return False


def json_files(folder: Path) -> list[Path]:
    """List ``*.json`` one and two levels deep, sorted; an absent folder is empty. Raises TableError as :func:`scan`."""
    found: list[Path] = []
    try:
        if not folder.is_dir():
            return []
        for child in sorted(islice(folder.iterdir(), MAX_FILES + 1)):
            found += [child] if child.suffix == ".json" else _json_children(child)
            if len(found) > MAX_FILES:
                raise TableError(f"{folder}: holds more than {MAX_FILES:,} .json files; name a folder of tables only")
    except OSError as error:
        raise TableError(f"{folder}: cannot be listed ({error.strerror or error}); mend its permissions") from None
    return found


def _json_children(folder: Path) -> list[Path]:
    if folder.name.startswith(".") or not folder.is_dir():
        return []
    return sorted(islice(folder.glob("*.json"), MAX_FILES + 1))
