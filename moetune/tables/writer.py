"""Write a tuned table so that it is whole or absent, and prove that the runtime finds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moetune.whole_file import write_whole
from moetune_kernels import lookup
from moetune_kernels.errors import TableError
from moetune_kernels.table import TunedTable
from moetune_kernels.table_file import read_bytes, table_path


def write_table(table: TunedTable, directory: Path) -> Path:
    """Write ``table`` to ``<directory>/<device slug>/<shape key>.json`` and read it back through the runtime's lookup.

    A table that was there is replaced in one step; a crash or a full disk leaves the old one whole. A table that would not
    come back as it went in is refused before anything is written.

    Raises:
        TableError: an entry would be dropped in reading, the folder cannot be written, or the lookup does not find the file.
    """
    path = table_path(directory, table.device, table.shape)
    data = table_text(table).encode()
    _refuse_changed(TunedTable.parse(data, f"table for {path}"), table, path)
    try:
        write_whole(path, data)
    except OSError as error:
        raise TableError(
            f"cannot write {path} ({error.strerror or error}); free the disk or name another folder with --out"
        ) from None
    lookup.reload()
    found = lookup.path_in(directory, table.shape, table.device)
    if found != path:
        got = "nothing" if found is None else found
        raise TableError(f"wrote {path}, but the runtime's lookup finds {got}; remove what stands in its way")
    if read_bytes(path) != data:  # which the runtime's parser has read already
        raise TableError(f"{path} holds something else than was written; do not let others write there meanwhile")
    return path


def table_text(table: TunedTable) -> str:
    """Return the file's text: the same for equal tables, fields in order, entries by token count."""
    return json.dumps(_ordered(table.to_json()), indent=1, allow_nan=False) + "\n"


def _ordered(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    keys = sorted(value, key=lambda key: (int(key) if key.isdecimal() else 0, key))
    return {key: _ordered(value[key]) for key in keys}


def _refuse_changed(read: TunedTable, written: TunedTable, path: Path) -> None:
    if read.faults:
        raise TableError(f"{path} would lose entries when read: {'; '.join(read.faults[:3])}")
    if read != replace(written, faults=()) and read.to_json() != written.to_json():
        raise TableError(f"{path} would not read back as it was written; this is a fault of moetune, please report it")
