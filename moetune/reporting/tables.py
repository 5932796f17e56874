"""Which tables a page shows: the given ones, else the user's, else the shipped ones; the newest of each kind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from moetune.errors import TableError
from moetune_kernels.paths import search_dirs, shipped_tables_dir
from moetune_kernels.table import MAX_TABLE_BYTES, TunedTable
from moetune_kernels.table_file import is_folder

MAX_TABLES = 24  # sections that a reader still scrolls through; all of them are drawn, in a few seconds


@dataclass(frozen=True, slots=True)
class Located:
    """A table and the file that it came from."""

    table: TunedTable
    path: Path


@dataclass(frozen=True, slots=True)
class FoundTables:
    """Tables, newest first, and sentences on what was left out."""

    tables: tuple[Located, ...]
    notes: tuple[str, ...]


def find_tables(given: Sequence[Path]) -> FoundTables:
    """Read the tables to show. What cannot be read becomes a note, never an error.

    Args:
        given: files, or folders to search; empty means MOETUNE_CONFIG_DIR and the user's folder, and the shipped
            tables where those hold none.
    """
    notes: list[str] = []
    if given:
        located = [*_read_all(given, notes)]
        empty = [path for path in given if is_folder(path) and not _files(path)]
        notes += [f"{path}: holds no tables; they are named <device>/<shape>.json" for path in empty]
    else:
        shipped = shipped_tables_dir()
        own = [folder for folder in search_dirs() if folder != shipped]
        located = [*_read_all(own, notes)] or [*_read_all([shipped], notes)]
    located.sort(key=lambda one: (_measured_at(one.table), str(one.path)), reverse=True)
    newest = _newest(located, notes)
    if len(newest) > MAX_TABLES:
        notes.append(f"only the newest {MAX_TABLES} of {len(newest)} tables are shown; name the others to see them")
    return FoundTables(tuple(newest[:MAX_TABLES]), tuple(notes))


def _read_all(paths: Sequence[Path], notes: list[str]) -> Iterator[Located]:
    seen: set[Path] = set()
    for path in paths:
        for file in _files(path):
            place = file.resolve()
            if place in seen:
                continue
            seen.add(place)
            try:
                yield Located(_read(file), file)
            except TableError as error:
                notes.append(str(error))
            except OSError as error:
                notes.append(f"{file}: cannot be read ({error.strerror or error}); it is left out")


def _files(path: Path) -> list[Path]:
    """Return the path itself, or every ``.json`` under it; a folder that is not there holds none."""
    if not is_folder(path):
        return [path] if path.suffix == ".json" or os.path.lexists(path) else []
    found = (Path(folder) / name for folder, _, names in os.walk(path) for name in names if name.endswith(".json"))
    return sorted(found)


def _read(path: Path) -> TunedTable:
    if not path.is_file():
        raise TableError(f"{path}: is no file; name a table or a folder of tables")
    if path.stat().st_size > MAX_TABLE_BYTES:
        raise TableError(f"{path}: is larger than any table ({MAX_TABLE_BYTES:,} B); it is left out")
    return TunedTable.parse(path.read_bytes(), str(path))


def _measured_at(table: TunedTable) -> datetime:
    """Return when the table was measured; a time that cannot be read counts as the oldest."""
    try:
        when = datetime.fromisoformat(table.measured_at)
        return when.astimezone(UTC) if when.tzinfo else when.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return datetime.min.replace(tzinfo=UTC)


def _newest(located: Sequence[Located], notes: list[str]) -> list[Located]:
    """Keep the first of each device, shape and backend."""
    kept: dict[tuple[object, ...], Located] = {}
    for one in located:
        key = (one.table.device, one.table.shape, one.table.backend)
        if key in kept:
            notes.append(f"{one.path}: left out, {kept[key].path} is newer and for the same device and shape")
        else:
            kept[key] = one
    return list(kept.values())
