"""What a compile pool and its process say to each other, through two pipes.

Both carry pickles, each behind its length in eight bytes. In: :class:`Setup`, then ``(number, pickled job)`` and
:class:`Recall`. Out: ``(number, outcome)``, and to each Recall ``(RECALLED, numbers)``. Jobs and outcomes go to the
process's children, and come back from them, in frames too.
"""

from __future__ import annotations

import os
import pickle
import struct
from dataclasses import dataclass
from typing import Any

SCRATCH_PREFIX = "moetune-compile-"
RECALLED = -1  # in the place of a job's number
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the process needs before the first job: how many children, how long each, and modules to import once."""

    workers: int
    limit_s: float
    preload: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """Takes back those of the jobs ``numbers`` that no child has begun; the answer says which, in their order."""

    numbers: frozenset[int]


def frame(value: Any) -> bytes:
    """Return ``value`` pickled behind its length."""
    body = pickle.dumps(value)
    return _LENGTH.pack(len(body)) + body


def unframe(buffer: bytearray) -> list[Any]:
    """Take every complete value off the front of ``buffer``."""
    values = []
    while len(buffer) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer)
        if len(buffer) < _LENGTH.size + length:
            break
        values.append(pickle.loads(buffer[_LENGTH.size : _LENGTH.size + length]))  # noqa: S301  # our own pipe
        del buffer[: _LENGTH.size + length]
    return values


def write(pipe: int, data: bytes) -> None:
    """Write all of ``data``."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def read_one(requests: int) -> Any:
    """Wait for the next value.

    Raises:
        EOFError: the other end closed.
    """
    head = _read_exactly(requests, _LENGTH.size)
    return pickle.loads(_read_exactly(requests, _LENGTH.unpack(head)[0]))  # noqa: S301  # our own pipe


def _read_exactly(requests: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(requests, count - len(data))
        if not piece:
            raise EOFError("the other end closed")
        data += piece
    return data
