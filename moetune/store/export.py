"""Trials as a file for other tools: CSV, JSON lines or Parquet, whole or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from moetune.errors import MissingError, RunError, UsageError
from moetune.store.codec import dump
from moetune.store.flat import COLUMNS, Kind, flat
from moetune.store.rows import ListedTrial
from moetune.whole_file import whole_file

_PANDAS_TYPES: dict[Kind, str] = {str: "string", int: "Int64", float: "Float64", bool: "boolean"}


def check_export(path: Path) -> Path:
    """Return ``path`` once it is clear that its kind of file can be written here: before the trials are read.

    Raises:
        UsageError: its name has none of the endings.
        MissingError: it is a Parquet file, and nothing here writes one.
    """
    if path.suffix not in _WRITERS:
        raise UsageError(f"--export takes a name that ends in {', '.join(_WRITERS)}; got {path.name[:80]}")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise MissingError(
            "a .parquet file needs pyarrow, which is not installed; run `pip install 'moetune[parquet]'`, "
            "or export to .csv or .jsonl"
        )
    return path


def export_trials(listed: Iterable[ListedTrial], path: Path) -> int:
    """Write one row per trial to ``path``, whose ending says how; return how many.

    Raises:
        UsageError, MissingError: as for :func:`check_export`.
        RunError: the file cannot be written.
    """
    write = _WRITERS[check_export(path).suffix]
    try:
        with whole_file(path) as file:
            return write(listed, file)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; free the disk or name another file") from None


def _write_csv(listed: Iterable[ListedTrial], file: BinaryIO) -> int:
    text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
    rows, count = csv.writer(text), 0
    rows.writerow(COLUMNS)
    for one in listed:
        rows.writerow(str(value).lower() if isinstance(value, bool) else value for value in flat(one).values())
        count += 1
    text.detach()  # flushes, and leaves the file open
    return count


def _write_lines(listed: Iterable[ListedTrial], file: BinaryIO) -> int:
    count = 0
    for one in listed:
        file.write(dump(flat(one)).encode() + b"\n")
        count += 1
    return count


def _write_parquet(listed: Iterable[ListedTrial], file: BinaryIO) -> int:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    rows: list[Any] = [flat(one) for one in listed]
    columns = {name: pd.array([row[name] for row in rows], dtype=_PANDAS_TYPES[kind]) for name, kind in COLUMNS.items()}
    whole = io.BytesIO()  # pyarrow closes what it writes to
    frame: Any = pd.DataFrame(columns)
    frame.to_parquet(whole, engine="pyarrow", index=False)
    file.write(whole.getbuffer())
    return len(rows)


_WRITERS: dict[str, Callable[[Iterable[ListedTrial], BinaryIO], int]] = {
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    ".jsonl": _write_lines,
}
