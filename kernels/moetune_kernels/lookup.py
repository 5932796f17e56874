"""From a call's shape, token count and device to the plan that serves it.

Order: tables in MOETUNE_CONFIG_DIR, the user's folder, the shipped folder, then a relative's tables in the same order,
then the default plan. Tables are found by what they say, not by their path: a renamed file still serves. Where a table
has no entry for a token count the next table is asked, so a sweep of one count does not hide a shipped table. All that is
read is remembered; :func:`reload` forgets it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from moetune_kernels.device import DeviceInfo, current_device, device_info
from moetune_kernels.device_match import is_relative, is_same_device
from moetune_kernels.errors import ShapeError, TableError, UnsupportedDeviceError, shown
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.kernel_hash import source_sha256
from moetune_kernels.paths import CONFIG_DIR_VARIABLE, search_dirs
from moetune_kernels.plan import LayerPlan
from moetune_kernels.serving_log import LOGGER, forget, is_debugging, warn_once
from moetune_kernels.shape import MAX_TOKENS, MoEShape
from moetune_kernels.table import Entry, TunedTable, span_text
from moetune_kernels.table_file import Found, is_folder, read_table, scan, table_path

ALLOW_UNMEASURED_VARIABLE = "MOETUNE_ALLOW_UNMEASURED"
TABLE, RELATIVE, HEURISTIC = "table", "relative", "heuristic"


class CudaDevice(Protocol):
    """What a ``torch.device`` of a GPU looks like; torch itself is not loaded here."""

    @property
    def type(self) -> str:
        """``cuda``; nothing else is served."""
        ...

    @property
    def index(self) -> int | None:
        """Which one, None for torch's current device."""
        ...


AnyDevice = DeviceInfo | CudaDevice | int | None


@dataclass(frozen=True, slots=True)
class Resolved:
    """The plan that serves a call, and where it comes from.

    ``source`` is ``table``, ``relative`` or ``heuristic``; ``path`` and ``entry_tokens`` name the table's file and entry,
    None for the heuristic; ``why`` is a sentence for people.
    """

    plan: LayerPlan
    source: str
    path: str | None
    entry_tokens: int | None
    why: str


@dataclass(frozen=True, slots=True)
class _Held:
    """A table that answers for one shape and device."""

    table: TunedTable
    path: str
    source: str


def best_plan(shape: MoEShape, tokens: int, device: AnyDevice = None) -> Resolved:
    """Return the plan that serves ``tokens`` of ``shape``; never fails for a table. Microseconds when warm.

    What is returned has ``.plan`` (give it to ``fused_moe``), ``.source`` (``table``, ``relative`` or ``heuristic``),
    ``.path`` and ``.entry_tokens`` (the table's file and the entry in it, None for the heuristic), and ``.why`` (a
    sentence for people).

    Args:
        shape: the layer as this rank sees it.
        tokens: T, from 0 to 131,072.
        device: a DeviceInfo, a ``torch.device`` of type cuda, a CUDA index, or None for torch's current device.

    Raises:
        UnsupportedDeviceError: no such CUDA device.
        UnsupportedConfigError: no kernel runs this weight format or device at all.
        ShapeError: ``shape`` is no MoEShape, or ``tokens`` is no whole number in that range.

    >>> from moetune_kernels.device import TARGETS
    >>> found = best_plan(MoEShape(hidden=512, inter=256, local_experts=8, top_k=2), 16, TARGETS["sm_90"])
    >>> found.source, found.path, found.entry_tokens, found.plan.block_m
    ('heuristic', None, None, 16)
    >>> found.why
    'default plan, because no table was found'
    """
    if not isinstance(shape, MoEShape):  # pyright: ignore[reportUnnecessaryIsInstance] - says so instead of failing later
        raise ShapeError(f"shape must be a MoEShape, got {shown(shape)}")
    if type(tokens) is not int or not 0 <= tokens <= MAX_TOKENS:
        raise ShapeError(f"tokens must be a whole number from 0 to {MAX_TOKENS}, got {shown(tokens)}")
    # The model's expert count is no part of the key, but the default plan reads it.
    return _resolve(shape, shape.experts, tokens, _info(device))


def find_table(shape: MoEShape, device: AnyDevice = None) -> tuple[TunedTable, str] | None:
    """Return the first table that answers for ``shape`` on ``device``, and its path; None where there is none."""
    held = _tables(shape, _info(device))
    return (held[0].table, held[0].path) if held else None


def path_in(folder: Path, shape: MoEShape, device: DeviceInfo) -> Path | None:
    """Return whose table the lookup would serve if ``folder`` came first and unmeasured tables counted; None for a miss."""
    found = next(_matching(shape, device, folder), None)
    return None if found is None else found.path


def reload() -> None:
    """Forget tables, choices, the environment's settings and which warnings were given: the next call reads anew."""
    for cached in (_resolve, _tables, _index):
        cached.cache_clear()
    forget()


def _info(device: AnyDevice) -> DeviceInfo:
    if isinstance(device, DeviceInfo):
        return device
    index = getattr(device, "index", None) if getattr(device, "type", None) == "cuda" else device
    if index is None:
        return current_device()
    if type(index) is not int:
        raise UnsupportedDeviceError(
            f"device must be a DeviceInfo, a CUDA torch.device, a CUDA index or None, got {shown(device)}"
        )
    return device_info(index)


@lru_cache(maxsize=4096)
def _resolve(shape: MoEShape, experts: int | None, tokens: int, device: DeviceInfo) -> Resolved:
    del experts
    tables = _tables(shape, device)
    for held in tables:
        entry = held.table.entry_for(tokens)
        if entry is not None:
            return Resolved(entry.plan, held.source, held.path, entry.tokens, _why_entry(entry, held, tokens))
    why = "default plan, because no table was found"
    if tables:
        first, last = min(tables[0].table.entries, default=0), max(tables[0].table.entries, default=0)
        why = f"default plan, because {tables[0].path} covers {first} to twice {last} tokens and has no entry for {tokens}"
    return Resolved(heuristic_plan(shape, tokens, device), HEURISTIC, None, None, why)


def _why_entry(entry: Entry, held: _Held, tokens: int) -> str:
    low, high = entry.serves
    reach = span_text(low, high) if tokens <= high else f"up to {2 * entry.tokens} tokens"
    last = "" if tokens <= high else "is the last and "
    return f"{held.source} {held.path}, whose entry {entry.tokens} {last}serves {reach}"


@lru_cache(maxsize=256)
def _tables(shape: MoEShape, device: DeviceInfo) -> tuple[_Held, ...]:
    """Return every table that may answer, in order, its unfit entries dropped, with one warning per file."""
    is_debugging()
    folders = search_dirs()
    named = os.environ.get(CONFIG_DIR_VARIABLE)
    if named and not is_folder(folders[0]):
        warn_once(f"{CONFIG_DIR_VARIABLE} names {folders[0]}, which is no folder; correct or unset it")
    held = [*_held(shape, device, folders, TABLE), *_held(shape, device, folders, RELATIVE)]
    if not held:
        _log_miss(shape, device, folders)
    return tuple(held)


def _held(shape: MoEShape, device: DeviceInfo, folders: tuple[Path, ...], source: str) -> Iterator[_Held]:
    unmeasured = os.environ.get(ALLOW_UNMEASURED_VARIABLE) == "1"
    for folder in folders:
        for found in _matching(shape, device, folder, source):
            if found.key is not None and found.key.backend != "cuda" and not unmeasured:
                LOGGER.debug(
                    "%s is unmeasured (%s); %s=1 allows it", found.path, found.key.backend, ALLOW_UNMEASURED_VARIABLE
                )
                continue
            try:
                table = read_table(found.path)
            except TableError as error:
                warn_once(f"table ignored: {error}")
                continue
            if source == RELATIVE:
                warn_once(f"{device.name} has no table for {shape.key}; {found.path} of {table.device.name} stands in")
            yield _Held(_fit_for(table, device, found.path), str(found.path), source)


def _matching(shape: MoEShape, device: DeviceInfo, folder: Path, source: str = TABLE) -> Iterator[Found]:
    """Yield the files of ``folder`` whose content is for this shape and device, the one at the expected path first."""
    is_for_us = is_relative if source == RELATIVE else is_same_device
    matching = [
        found
        for found in _index(folder)
        if found.key is not None and found.key.shape == shape and is_for_us(found.key.device, device)
    ]
    expected = table_path(folder, device, shape)
    yield from sorted(matching, key=lambda found: (found.path != expected, found.path))


@lru_cache(maxsize=64)
def _index(folder: Path) -> tuple[Found, ...]:
    try:
        files = tuple(scan(folder))
    except TableError as error:
        warn_once(f"tables ignored: {error}")
        return ()
    for found in files:
        if found.fault is not None:
            warn_once(f"table ignored: {found.fault}")
    return files


def _fit_for(table: TunedTable, device: DeviceInfo, path: Path) -> TunedTable:
    """Drop entries that this very device cannot run, and warn once of all that is wrong with the file."""
    reasons = {tokens: entry.plan.why_not(device, table.shape) for tokens, entry in table.entries.items()}
    faults = [*table.faults, *(f"entry {tokens}: {reason}" for tokens, reason in reasons.items() if reason is not None)]
    if faults:
        shown = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
        warn_once(f"{path}: not used: {shown}; the rest serves; see `moetune check {path}`")
    elif not is_of_these_kernels(table):
        warn_once(f"{path}: the kernels changed since it was measured; it still serves; run again: {table.command}")
    usable: Mapping[int, Entry] = {tokens: entry for tokens, entry in table.entries.items() if reasons[tokens] is None}
    return replace(table, entries=usable)


def is_of_these_kernels(table: TunedTable) -> bool:
    """Say whether the kernel files that the table's plans use are, byte for byte, those it was measured with."""
    plans = [entry.plan for entry in table.entries.values()]
    return source_sha256(plans) == table.kernels["source_sha256"]


def _log_miss(shape: MoEShape, device: DeviceInfo, folders: tuple[Path, ...]) -> None:
    searched = f"{device.slug}/{shape.key}"
    held = {
        f"{found.key.device.slug}/{found.key.shape.key}" for folder in folders for found in _index(folder) if found.key
    }
    nearest = difflib.get_close_matches(searched, held, n=3, cutoff=0.0)
    LOGGER.debug(
        "no table %s in %s; nearest held: %s", searched, ", ".join(map(str, folders)), ", ".join(nearest) or "none"
    )
