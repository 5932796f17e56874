"""Every error that the tuner raises on purpose, and the exit code that the command line gives it.

MoetuneError                the runtime's base: the message says what, got, and the fix
├── UsageError     exit 2   a bad flag, a bad input file, a combination that makes no sense (also a ValueError)
├── MissingError   exit 3   something that this machine lacks: a GPU, a compiler, a recording
├── RunError       exit 1   failed while running: no candidate passed, a device fault, a table that reads back wrong
└── the runtime's own       ShapeError, UnsupportedConfigError (exit 2), UnsupportedDeviceError (exit 3), TableError (1)
"""

from __future__ import annotations

from moetune_kernels.errors import (
    MoetuneError,
    ShapeError,
    TableError,
    UnsupportedConfigError,
    UnsupportedDeviceError,
)

__all__ = [
    "MissingError",
    "MoetuneError",
    "RunError",
    "ShapeError",
    "TableError",
    "UnsupportedConfigError",
    "UnsupportedDeviceError",
    "UsageError",
    "exit_code",
]


class UsageError(MoetuneError, ValueError):
    """A flag, an input file or a combination of them that cannot be used."""


class MissingError(MoetuneError):
    """The command needs something that this machine lacks."""


class RunError(MoetuneError):
    """The command started and failed while running."""


# Subclasses first: the first match decides.
_EXIT_CODES: tuple[tuple[type[MoetuneError], int], ...] = (
    (UsageError, 2),
    (ShapeError, 2),
    (UnsupportedConfigError, 2),
    (TableError, 1),  # of a table that was written or looked up; one that the user names is checked by the command
    (MissingError, 3),
    (UnsupportedDeviceError, 3),
    (MoetuneError, 1),
)


def exit_code(error: MoetuneError) -> int:
    """Return the process exit code that stands for ``error``.

    >>> exit_code(UsageError("--tokens must be positive, got 0"))
    2
    """
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))
