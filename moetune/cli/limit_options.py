"""The options that limit what a sweep tries, and the parsing of their values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.options import given_path
from moetune.errors import UsageError
from moetune.space import Limits, read_space_file
from moetune.space.limits import REGISTER_LIMITS, SMEM_LIMITS
from moetune_kernels.config import Structure

_PANEL = "What may win"
_SIZE = re.compile(r"(\d{1,7})\s*(b|k|kb|kib)?", re.ASCII | re.IGNORECASE)
_STRUCTURES = ", ".join(one.value for one in Structure)

MaxSmemOpt = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES",
        help="Most shared memory of a block: 98304, 96KiB or 96KB, all the same.",
        rich_help_panel=_PANEL,
    ),
]
MaxRegistersOpt = Annotated[
    int | None, typer.Option(metavar="N", help="Most registers of a thread.", rich_help_panel=_PANEL)
]
StructuresOpt = Annotated[
    str | None,
    typer.Option(metavar="LIST", help=f"Only these, with commas between: {_STRUCTURES}.", rich_help_panel=_PANEL),
]
SpaceOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=given_path,
        help="JSON: the only values of each axis, or configs.",
        rich_help_panel=_PANEL,
    ),
]


def parse_limits(
    max_smem: str | None = None,
    max_registers: int | None = None,
    structures: str | None = None,
    space: Path | None = None,
) -> Limits:
    """Return the limits that the options name.

    Raises:
        UsageError: a value makes no sense, or the file is no space file.
    """
    low, high = REGISTER_LIMITS
    if max_registers is not None and not low <= max_registers <= high:
        raise UsageError(f"--max-registers must be from {low} to {high}, got {max_registers}")
    return Limits(
        max_smem=None if max_smem is None else parse_bytes(max_smem, "--max-smem"),
        max_registers=max_registers,
        structures=() if structures is None else parse_structures(structures),
        file=None if space is None else read_space_file(space),
    )


def parse_bytes(text: str, flag: str) -> int:
    """Return a size of shared memory in bytes. K means 1,024 with or without an i, as in every GPU's data sheet.

    Raises:
        UsageError: no size, or one that no block could have.

    >>> parse_bytes("98304", "--max-smem"), parse_bytes("96KiB", "--max-smem"), parse_bytes("96 kb", "--max-smem")
    (98304, 98304, 98304)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{flag} takes bytes, e.g. 98304, 96KiB or 96KB (K is 1,024); got {text[:40]!r}")
    unit = (found.group(2) or "").lower()
    size = int(found.group(1)) * (1024 if unit.startswith("k") else 1)
    low, high = SMEM_LIMITS
    if not low <= size <= high:
        raise UsageError(f"{flag} must be from {low} to {high:,} bytes, got {size:,}")
    return size


def parse_structures(text: str) -> tuple[Structure, ...]:
    """Return the structures of a comma list, in the order of their definition.

    Raises:
        UsageError: an unknown one, or none.

    >>> [one.value for one in parse_structures("tma, gather")]
    ['gather', 'tma']
    """
    names = {one.value: one for one in Structure}
    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if word not in names]
    if unknown:
        raise UsageError(f"--structures takes {_STRUCTURES}, with commas between; got {unknown[0][:40]!r}")
    return tuple(one for one in Structure if one.value in words)
