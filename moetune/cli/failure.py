"""The one place that turns an error into a sentence and an exit code.

0 done · 1 failed while running · 2 bad usage or input · 3 needs something that this machine lacks · 130 Ctrl-C
"""

from __future__ import annotations

import errno
import os
import traceback

from moetune.cli.output import out
from moetune.errors import MoetuneError, exit_code

FAILED = 1
USAGE = 2
MISSING = 3
INTERRUPTED = 130
TRACEBACK_SWITCH = "MOETUNE_TRACEBACK"

_INSTALLABLE = frozenset({"torch", "triton", "numpy", "pandas", "matplotlib", "jinja2", "pynvml"})


def fail(error: BaseException) -> int:
    """Say ``error`` in one line on stderr and return its exit code; the traceback only where it was asked for."""
    if os.environ.get(TRACEBACK_SWITCH, "") not in ("", "0"):
        out.progress("".join(traceback.format_exception(error)))
    sentence, code = explain(error)
    out.error(sentence)
    return code


def explain(error: BaseException) -> tuple[str, int]:
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
    # Usage errors of the command-line parser: its exception classes are not public, their message method is.
    message = getattr(error, "format_message", None)
    if callable(message):
        return _usage(error, str(message())), USAGE
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"internal error, please report it: {what[:300]} (set {TRACEBACK_SWITCH}=1 to see where)", FAILED


def _usage(error: BaseException, message: str) -> str:
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "moetune")
    return f"{message.rstrip('.')}; see `{command} --help`"
