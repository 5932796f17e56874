"""What the tuner and its GPU process say to each other: pickles, each behind its length in eight bytes.

A process that was just started imports and waits. The tuner sends :class:`Start` once the GPU is its own, and hears
:class:`Ready` or :class:`Refused`; then an :class:`Answer` follows every :class:`Ask`, or several do where that says so.
Whatever else arrives, or stops in the middle, is a broken process and never waited for.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moetune.engine.backend import Ceilings
from moetune.errors import MoetuneError
from moetune.models.routing import UNIFORM, Routing
from moetune.outcome import Compiled, Failed
from moetune_kernels import __version__
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import MoEShape

# The version too: a process that starts anew in the middle of a sweep must not load what was installed since.
HANDSHAKE = ("moetune gpu process", 2, __version__)
MAX_MESSAGE_BYTES = 64 << 20  # thousands of compiled kernels are one; eight bytes of text read as a length are more
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSettings:
    """What the trials of one sweep are made from: the layer, the device as torch counts it, and all inputs' seed and routing."""

    shape: MoEShape
    device_index: int = 0
    seed: int = 0
    routing: Routing = UNIFORM


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message: what to load.

    Args:
        factory: ``module:function``, called with ``settings``, that returns the trials.
        settings: its argument.
    """

    factory: str
    settings: GpuSettings
    handshake: tuple[str, int, str] = HANDSHAKE


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The trials are loaded on ``device``."""

    device: DeviceInfo
    handshake: tuple[str, int, str] = HANDSHAKE


@dataclass(frozen=True, slots=True)
class Refused:
    """The trials cannot be loaded, with the sentence for the user."""

    error: MoetuneError


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What the process may have missed, because others found it out or because it is new."""

    compiled: Mapping[tuple[Role, MoEKernelConfig], Compiled] = field(
        default_factory=dict[tuple[Role, MoEKernelConfig], Compiled]
    )
    ceilings: Ceilings | None = None


# A sweep sends thousands of these, and a tuple is pickled in a third of the time that a dataclass takes.


class Ask(NamedTuple):
    """One question: a method of the trials and its arguments.

    ``learned`` is what the process has not been told yet, None where that is nothing. ``answers`` is how many answers
    follow, where the method yields them one after the other; None where it returns one.
    """

    number: int
    method: str
    arguments: tuple[Any, ...]
    learned: Learned | None = None
    answers: int | None = None


class Answer(NamedTuple):
    """What the method returned; ``lost`` says why nothing more can be asked of that process, None while it goes on."""

    number: int
    value: Any = None
    lost: Failed | None = None


class Stop(NamedTuple):
    """Nobody wants the answers any more that question ``number`` still has; those that are given already stay."""

    number: int


class Stopped(NamedTuple):
    """In place of the answers that question ``number`` had left."""

    number: int


class TornMessageError(Exception):
    """Bytes that are no message."""


def packed(message: object) -> bytes:
    """Return ``message`` as bytes; raises whatever pickle raises."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Inbox:
    """Collects bytes and gives back whole messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        """Take what was read from the pipe."""
        self._bytes += data

    def take(self) -> Any | None:
        """Return the next whole message, or None when more bytes are needed.

        Raises:
            TornMessageError: what came is no message, and never will be.
        """
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > MAX_MESSAGE_BYTES:
            raise TornMessageError(f"a message cannot have {length:,} bytes")
        if len(self._bytes) < _LENGTH.size + length:
            return None
        body = bytes(self._bytes[_LENGTH.size : _LENGTH.size + length])
        del self._bytes[: _LENGTH.size + length]
        try:
            return pickle.loads(body)  # noqa: S301  # from our own process
        except Exception as error:
            raise TornMessageError(f"a message could not be read: {type(error).__name__}") from error
