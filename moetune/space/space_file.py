"""Read the file of ``--space``: JSON that names values of axes, configs, or both, for both GEMMs or for each.

The file is foreign until all of it is checked: size, encoding, nesting, names, types, ranges, repeats, and how many configs
it makes. Every error names the place.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

from moetune.errors import UnsupportedConfigError, UsageError
from moetune.space.axes import BLOCK_KS, BLOCK_NS, CEILING, NAMES, STAGES, WARPS, Axes
from moetune.space.limits import NO_CEILING, Allowed, SpaceFile, without_ceiling
from moetune_kernels.config import BLOCK_SIZES, MoEKernelConfig, Role, Structure
from moetune_kernels.errors import shown

MAX_FILE_BYTES = 1 << 20
MAX_CONFIGS = 100_000  # of one GEMM's axes: some seconds of enumeration; a sweep compiles a few hundred of them
LISTED = "configs"
OPTIONAL = ("max_registers", CEILING)  # null: none

_ROLES = tuple(role.value for role in Role)
_AXES = (*NAMES, CEILING)
_PROBE = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=16, block_k=16)
# How many values an axis has that the file does not name; register caps depend on the tile, so the most there are.
_FREE_SIZES: Mapping[str, int] = {
    "structure": len(Structure),
    "block_m": len(BLOCK_SIZES),
    "block_n": len(BLOCK_NS),
    "block_k": len(BLOCK_KS),
    "num_warps": len(WARPS),
    "prefetch_distance": len(STAGES),
    "max_registers": 9,
    "group_m": 1,
}


def read_space_file(path: Path) -> SpaceFile:
    """Return what the file at ``path`` allows.

    Raises:
        UsageError: it cannot be read, or something in it is wrong; the message says where.
    """
    value = _load(path)
    try:
        return SpaceFile(name=str(path), allowed=_by_role(value))
    except _FaultError as fault:
        raise UsageError(f"--space {path}: {fault}") from None


class _FaultError(ValueError):
    """What is wrong, place first; :func:`read_space_file` adds the file."""


def _text(path: Path) -> str:
    """Return the file's text; regular files only, since a pipe would hang."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"--space {path} is not a file; give a JSON file")
        if found.st_size > MAX_FILE_BYTES:
            raise UsageError(f"--space {path} has {found.st_size:,} bytes; a space file has at most {MAX_FILE_BYTES:,}")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)  # no more, should it grow
        return data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--space {str(path)[:80]} cannot be read ({error.strerror}); give a JSON file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--space {path} is not UTF-8 text at byte {error.start}; give a JSON file") from None


def _load(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object_once)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise UsageError(f"--space {path} is not valid JSON at {place}: {error.msg}") from None
    except _FaultError as fault:
        raise UsageError(f"--space {path}: {fault}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets without end
        what = "nested too deeply" if isinstance(error, RecursionError) else "it has a number of thousands of digits"
        raise UsageError(f"--space {path} is not a space file: {what}") from None
    if not isinstance(value, dict):
        raise UsageError(f"--space {path} must hold a JSON object, got {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _refuse_constant(text: str) -> float:
    raise _FaultError(f"{text} is no JSON number; every value is a whole number, a name or null")


def _object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _FaultError(f"{shown(name)} stands twice in one object; name it once")
        found[name] = value
    return found


def _by_role(value: dict[str, Any]) -> dict[Role, Allowed]:
    roles, shared = [name for name in value if name in _ROLES], [name for name in value if name not in _ROLES]
    if roles and shared:
        raise _FaultError(
            f"{shown(shared[0])} is for both GEMMs, {shown(roles[0])} for one; put all of it under gate_up and down, or none"
        )
    if not roles:
        allowed = _allowed(value, "")
        return dict.fromkeys(Role, allowed)
    return {Role(name): _allowed(value[name], f"{name}.") for name in roles}


def _allowed(value: Any, at: str) -> Allowed:
    """Return what one object allows; ``at`` is its place, with a dot behind."""
    if not isinstance(value, dict):
        raise _FaultError(f"{at.rstrip('.')} must be an object of axes, got {type(value).__name__}")
    named = cast("dict[str, Any]", value)
    unknown = [name for name in named if name not in (*_AXES, LISTED)]
    if unknown:
        raise _FaultError(f"{at}{shown(unknown[0])} is no axis; the axes are {', '.join(_AXES)}, and configs is a list")
    if not named:
        raise _FaultError(f"{at.rstrip('.') or 'it'} names nothing; name at least one axis, or configs")
    listed = _listed(named.pop(LISTED), f"{at}{LISTED}") if LISTED in named else {}
    values = {name: _axis(name, items, f"{at}{name}") for name, items in named.items()}
    ceilings = values.pop(CEILING, None)
    if not values and ceilings is None:
        return Allowed(listed=listed)
    size = prod(len(values.get(name, range(free))) for name, free in _FREE_SIZES.items())
    if size > MAX_CONFIGS:
        raise _FaultError(
            f"{at.rstrip('.') or 'it'} makes up to {size:,} configs, at most {MAX_CONFIGS:,} are enumerated; name fewer values"
        )
    # Of several ceilings the highest counts: a kernel that keeps to a lower one keeps to it as well, and is one kernel.
    highest = None if ceilings is None or None in ceilings else max(ceilings)
    return Allowed(axes=Axes(values, highest), listed=listed)


def _axis(name: str, value: Any, at: str) -> tuple[Any, ...]:
    items = _list(value, at)
    found: list[Any] = []
    for place, item in enumerate(items):
        checked = _value(name, item, f"{at}[{place}]")
        if checked in found:
            raise _FaultError(f"{at}[{place}] repeats {shown(item)}; name each value once")
        found.append(checked)
    return tuple(found)


def _value(name: str, item: Any, at: str) -> Any:
    if item is None and name in OPTIONAL:
        return None
    try:
        return Structure(item) if name == "structure" else getattr(replace(_PROBE, **{name: item}), name)
    except UnsupportedConfigError as error:
        raise _FaultError(f"{at}: {_short(error)}") from None
    except ValueError:
        names = ", ".join(one.value for one in Structure)
        raise _FaultError(f"{at}: structure must be one of {names}, got {shown(item)}") from None


def _listed(value: Any, at: str) -> dict[MoEKernelConfig, int]:
    items = _list(value, at)
    places: dict[MoEKernelConfig, int] = {}
    found: dict[MoEKernelConfig, int] = {}
    for place, item in enumerate(items):
        try:
            config = MoEKernelConfig.from_json(item)
        except UnsupportedConfigError as error:
            raise _FaultError(f"{at}[{place}]: {_short(error)}") from None
        if config in places:
            raise _FaultError(f"{at}[{place}] repeats {at}[{places[config]}]; list each config once")
        places[config] = place
        choice, ceiling = without_ceiling(config), config.smem_size or NO_CEILING
        found[choice] = max(ceiling, found.get(choice, 0))
    return found


def _list(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list):
        raise _FaultError(f"{at} must be a list, got {type(value).__name__}")
    items = cast("list[Any]", value)
    if not items:
        raise _FaultError(f"{at} is empty; name at least one value, or leave it away")
    return items


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 300 else f"{text[:299]}…"
