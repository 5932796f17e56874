"""Say everything that is wrong with a table file, or with every table of a folder, one sentence per fault.

The runtime serves what it can and warns; here each of those warnings is a fault, and so is what only costs speed: a gap in
the ladder of token counts, an entry slower than the default plan, a table measured with other kernels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from moetune.models.routing import is_routing_text
from moetune_kernels.errors import TableError, shown
from moetune_kernels.lookup import ALLOW_UNMEASURED_VARIABLE, is_of_these_kernels
from moetune_kernels.table import REACH, TunedTable, span_text
from moetune_kernels.table_file import json_files, read_table, table_path

MAX_STEP = (
    4  # neighbours further apart than this leave token counts to a plan measured at under half or over twice theirs
)


def check_path(path: Path) -> list[str]:
    """Return the faults of one table, or of every ``*.json`` in a folder and its direct subfolders; empty when all is well."""
    if not path.exists():
        return [f"{path}: there is no such file or folder"]
    if not path.is_dir():
        return _check_file(path)[1]
    try:
        files = json_files(path)
    except TableError as error:
        return [str(error)]
    if not files:
        return [f"{path}: holds no tables; they are named <device>/<shape>.json"]
    faults: list[str] = []
    tables: dict[Path, TunedTable] = {}
    for file in files:
        table, found = _check_file(file)
        faults += found
        if table is not None:
            tables[file] = table
    return [*faults, *_twins(tables)]


def _check_file(path: Path) -> tuple[TunedTable | None, list[str]]:
    try:
        table = read_table(path)
    except TableError as error:
        return None, [str(error)]
    rules = (_unmeasured, _gaps, _claims, _slow_entries, _other_kernels, _unknown_routing)
    faults = [*table.faults, *_misplaced(table, path), *(fault for rule in rules for fault in rule(table))]
    return table, [f"{path}: {fault}" for fault in faults]


def _misplaced(table: TunedTable, path: Path) -> Iterator[str]:
    expected = table_path(Path(), table.device, table.shape)
    if (path.parent.resolve().name, path.name) != (expected.parent.name, expected.name):
        yield f"its content says {expected}; rename the file, or correct its device and shape"


def _unmeasured(table: TunedTable) -> Iterator[str]:
    if table.backend != "cuda" and os.environ.get(ALLOW_UNMEASURED_VARIABLE) != "1":
        yield (
            f"backend is {table.backend}, so the runtime ignores it; sweep on the GPU, or set {ALLOW_UNMEASURED_VARIABLE}=1"
        )


def _gaps(table: TunedTable) -> Iterator[str]:
    """Between neighbours: too far apart, or ranges that overlap or leave a hole."""
    for lower, upper in pairwise(table.entries.values()):
        if upper.tokens > MAX_STEP * lower.tokens:
            yield f"gap between entries {lower.tokens} and {upper.tokens}; sweep token counts between them too"
        if upper.serves[0] <= lower.serves[1]:
            yield f"entries {lower.tokens} and {upper.tokens} both serve {upper.serves[0]} tokens; correct their ranges"
        elif upper.serves[0] > lower.serves[1] + 1:
            hole = span_text(lower.serves[1] + 1, upper.serves[0] - 1)
            yield f"no entry serves {hole}; correct the neighbours' ranges"


def _claims(table: TunedTable) -> Iterator[str]:
    """At the ends: ranges that the lookup does not grant."""
    entries = list(table.entries.values())
    for entry in entries[-1:]:
        if entry.serves[1] > REACH * entry.tokens:
            yield f"entry {entry.tokens} claims {entry.serves[1]} tokens, the last serves up to {REACH * entry.tokens}"
    for entry in entries[:1]:
        if entry.serves[0] < entry.tokens:
            yield f"entry {entry.tokens} claims {entry.serves[0]} tokens, below the first entry the default plan serves"


def _slow_entries(table: TunedTable) -> Iterator[str]:
    for entry in table.entries.values():
        if entry.baseline_us is not None and entry.median_us > entry.baseline_us + entry.spread_us:
            yield (
                f"entry {entry.tokens} takes {entry.median_us:g} us, the default plan {entry.baseline_us:g} us; sweep again"
            )


def _other_kernels(table: TunedTable) -> Iterator[str]:
    if not table.faults and not is_of_these_kernels(table):
        yield f"the kernels changed since it was measured (source_sha256); run again: {table.command}"


def _unknown_routing(table: TunedTable) -> Iterator[str]:
    if not is_routing_text(table.routing):
        yield f"routing {shown(table.routing)} is none that this moetune knows; upgrade moetune, or sweep again"


def _twins(tables: dict[Path, TunedTable]) -> Iterator[str]:
    seen: dict[tuple[object, object], Path] = {}
    for path, table in tables.items():
        first = seen.setdefault((table.device, table.shape), path)
        if first != path:
            yield f"{path}: is for the same device and shape as {first}; keep one"
