"""What was read from a compiled kernel, kept beside it in Triton's cache, so that the next sweep starts no disassembler.

One small JSON file per cache entry. It names the cubin that it is about by hash, and the version of the reader: any other
cubin or version, and any file that is not exactly what this module writes, counts as no file and is written anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
from dataclasses import dataclass
from typing import Any

from moetune.measure.sass import READER_VERSION, InstructionMix, is_tensor_instruction

_FILE = "moetune-sass.json"
_MOST_BYTES = 1024  # what is written takes 250
_MOST_REGISTERS = 255
_MOST_SPILLS = 1 << 20
_MOST_INSTRUCTIONS = 1 << 28
_MOST_MACS = 1e15
_KEYS = {"reader", "cubin", "registers", "spills", "mix"}
_MIX_KEYS = {"fixed", "loop", "loop_macs", "tensor"}


@dataclass(frozen=True, slots=True)
class Notes:
    """Registers per thread, spilled registers, and the instruction mix of one cubin; None where that was never read."""

    registers: int
    spills: int
    mix: InstructionMix | None


def recall(entry: str, cubin: bytes) -> Notes | None:
    """Return what is known of ``cubin``, or None.

    Args:
        entry: hash of the kernel's entry in Triton's cache.
        cubin: the compiled kernel.
    """
    with contextlib.suppress(Exception):  # whatever is wrong with a cache or what lies in it, the cubin can be read
        path = _cache(entry).get_file(_FILE)
        if path is not None:
            return _notes(_read(path), _hash(cubin))
    return None


def keep(entry: str, cubin: bytes, notes: Notes) -> None:
    """Write ``notes`` of ``cubin`` into the kernel's entry in Triton's cache, whole or not at all; never fails."""
    mix = notes.mix
    value = {
        "reader": READER_VERSION,
        "cubin": _hash(cubin),
        "registers": notes.registers,
        "spills": notes.spills,
        "mix": mix and {"fixed": mix.fixed, "loop": mix.loop, "loop_macs": mix.loop_macs, "tensor": mix.tensor},
    }
    with contextlib.suppress(
        Exception
    ):  # a full disk or a read-only cache costs the next sweep time, not this one a kernel
        _cache(entry).put(json.dumps(value), _FILE, binary=False)


def _cache(entry: str) -> Any:
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(entry)


def _hash(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe in its place must not hold us up
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a file")
        return os.read(descriptor, _MOST_BYTES + 1)
    finally:
        os.close(descriptor)


def _notes(text: bytes, cubin: str) -> Notes | None:
    if len(text) > _MOST_BYTES:
        return None
    value = json.loads(text)
    if not isinstance(value, dict) or value.keys() != _KEYS:
        return None
    if not _is_count(value["reader"], READER_VERSION) or value["reader"] != READER_VERSION or value["cubin"] != cubin:
        return None
    registers, spills, mix = value["registers"], value["spills"], value["mix"]
    if not (_is_count(registers, _MOST_REGISTERS) and _is_count(spills, _MOST_SPILLS)):
        return None
    if mix is None:
        return Notes(registers, spills, None)
    return Notes(registers, spills, _mix(mix)) if _is_mix(mix) else None


def _mix(value: dict[str, Any]) -> InstructionMix:
    return InstructionMix(value["fixed"], value["loop"], value["loop_macs"], value["tensor"])


def _is_mix(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == _MIX_KEYS
        and all(value[name] is None or _is_count(value[name], _MOST_INSTRUCTIONS) for name in ("fixed", "loop"))
        and (value["loop_macs"] is None or _is_number(value["loop_macs"]))
        and (value["tensor"] is None or (isinstance(value["tensor"], str) and is_tensor_instruction(value["tensor"])))
    )


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= _MOST_MACS
