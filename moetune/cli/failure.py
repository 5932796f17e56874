"""The one place that turns an error into a sentence and an exit code.

0 done · 1 failed while running · 2 bad usage or input · 3 needs something that this machine lacks · 130 Ctrl-C
"""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Sequence
from itertools import pairwise

from moetune.cli.output import out
from moetune.errors import MoetuneError, exit_code

FAILED = 1
USAGE = 2
MISSING = 3
INTERRUPTED = 130
TRACEBACK_SWITCH = "MOETUNE_TRACEBACK"

_INSTALLABLE = frozenset({"torch", "triton", "numpy", "pandas", "matplotlib", "jinja2", "pynvml"})


def fail(error: BaseException, arguments: Sequence[str] = ()) -> int:
    """Say what ``arguments`` ran into in one line on stderr, and return its exit code; the traceback only on demand."""
    if os.environ.get(TRACEBACK_SWITCH, "") not in ("", "0"):
        out.progress("".join(traceback.format_exception(error)))
    sentence, code = explain(error, arguments)
    out.error(sentence)
    return code


def explain(error: BaseException, arguments: Sequence[str] = ()) -> tuple[str, int]:
    """Return the sentence and the exit code for ``error``.

    >>> from moetune.errors import UsageError
    >>> explain(UsageError("--tokens must be positive, got 0"))
    ('--tokens must be positive, got 0', 2)
    """
    if isinstance(error, MoetuneError):
        return str(error), exit_code(error)
    if isinstance(error, ModuleNotFoundError) and error.name in _INSTALLABLE:
        package = "nvidia-ml-py" if error.name == "pynvml" else error.name
        return f"this command needs {package}, which is not installed; run `pip install {package}`", MISSING
    if isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
    ):
        where = error.filename or "a file"
        return f"cannot write or read {where}: {error.strerror}", FAILED
    if isinstance(error, FileNotFoundError) and error.filename is None:  # what os.getcwd says
        return "the current folder is gone; change to one that exists", FAILED
    # Usage errors of the command-line parser: its exception classes are not public, their message method is.
    message = getattr(error, "format_message", None)
    if callable(message):
        return _usage(error, str(message()), arguments), USAGE
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"internal error, please report it: {what[:300]} (set {TRACEBACK_SWITCH}=1 to see where)", FAILED


def _usage(error: BaseException, message: str, arguments: Sequence[str]) -> str:
    context = getattr(error, "ctx", None)
    named = [word for word in arguments[:1] if word.isalpha()]  # some errors come without a context
    command = getattr(context, "command_path", None) or " ".join(["moetune", *named])
    given = _given(getattr(getattr(error, "param", None), "opts", ()), arguments)
    got = "" if given is None or repr(given) in message else f", got {given[:40]!r}"
    return f"{message.rstrip('.')}{got}; see `{command} --help`"


def _given(names: Sequence[str], arguments: Sequence[str]) -> str | None:
    """Return the last value that the option called one of ``names`` was given: the parser's message leaves it out."""
    values = [value for option, value in pairwise(arguments) if option in names]
    values += [word.partition("=")[2] for word in arguments if word.partition("=")[0] in names and "=" in word]
    return values[-1] if values else None
