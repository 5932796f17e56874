"""Parse what ``ncu --csv --page raw`` prints: names in the first row, units in the second, then one row per launch."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_PREFIX = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {
    "nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "second": 1.0,
    "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0,
}  # fmt: skip
_KERNEL_NAME = "Kernel Name"
_PASSES = re.compile(r'^==PROF== Profiling "(?P<kernel>[^"]*)".*?(?P<passes>\d+) pass', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LaunchRow:
    """One profiled launch: the kernel's name, its values by metric name (time in ns), and the passes that it took."""

    kernel: str
    values: Mapping[str, float]
    passes: int | None = None


def parse(log: str) -> list[LaunchRow]:
    """Return the launches in the order in which they ran; none when the log holds no table.

    Lines that do not start with a quote are messages of the tool. A value that is missing, ``n/a`` or ``nan`` is left
    out. Values come in base units whatever the log's units are: bytes, nanoseconds, cycles, hertz.
    """
    lines = [line for line in log.splitlines() if line.startswith('"')]
    table = list(csv.reader(lines))
    start = next((index for index, row in enumerate(table) if _KERNEL_NAME in row), None)
    if start is None or start + 2 > len(table):
        return []
    header, units = table[start], table[start + 1]
    passes = [int(found.group("passes")) for found in _PASSES.finditer(log)]
    rows = [row for row in table[start + 2 :] if len(row) == len(header)]
    told = passes if len(passes) == len(rows) else [None] * len(rows)
    return [_row(header, units, row, count) for row, count in zip(rows, told, strict=True)]


def _row(header: list[str], units: list[str], row: list[str], passes: int | None) -> LaunchRow:
    values: dict[str, float] = {}
    for name, unit, text in zip(header, units, row, strict=True):
        number = _number(text) if "__" in name else None  # all metric names have one, all other columns none
        if number is not None:
            values[name] = number * unit_scale(unit)
    return LaunchRow(row[header.index(_KERNEL_NAME)].split("(")[0], values, passes)


def _number(text: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def unit_scale(unit: str) -> float:
    """Return what a value in ``unit`` is multiplied by to be in base units; times are in nanoseconds.

    >>> unit_scale("Mbyte"), unit_scale("usecond"), unit_scale("cycle/nsecond"), unit_scale("%")
    (1000000.0, 1000.0, 1000000000.0, 1.0)
    """
    above, _, below = unit.strip().partition("/")
    return _factor(above, 1e9) / _factor(below, 1.0)


def _factor(unit: str, seconds_are: float) -> float:
    if unit in _SECONDS:
        return round(_SECONDS[unit] * seconds_are, 12)
    return _PREFIX.get(unit[:1], 1.0) if unit[1:].islower() else 1.0
