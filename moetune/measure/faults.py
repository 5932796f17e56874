"""Turn what a kernel launch may raise, or how its process may end, into a failed trial; tell a lost device from those."""

from __future__ import annotations

import signal

from moetune.measure.compile_worker import one_line
from moetune.outcome import Failed, FailureKind

# By name, so that neither torch nor triton must be imported to judge; each Triton release moves some of them.
_KINDS = {
    "OutOfResources": FailureKind.RESOURCES,
    "OutOfMemoryError": FailureKind.RESOURCES,
    "MemoryError": FailureKind.RESOURCES,
    "CompilationError": FailureKind.COMPILE,
    "CompileTimeAssertionFailure": FailureKind.COMPILE,
    "PTXASError": FailureKind.COMPILE,
    "UnsupportedLanguageConstruct": FailureKind.COMPILE,
    "MLIRError": FailureKind.COMPILE,
    "DeviceHungError": FailureKind.TIMEOUT,
}
# Words of CUDA errors after which every later call fails too.
_STICKY = (
    "illegal memory access",
    "misaligned address",
    "illegal instruction",
    "illegal address",
    "invalid program counter",
    "launch failure",
    "unspecified launch",
    "device-side assert",
    "hardware stack error",
    "launch timed out",
    "uncorrectable",
    "fallen off the bus",
)


def failure(error: Exception) -> Failed:
    """Return the failed trial that ``error`` stands for.

    >>> failure(RuntimeError("CUDA error: misaligned address")).kind
    <FailureKind.LAUNCH: 'launch'>
    """
    names = [kind.__name__ for kind in type(error).__mro__]
    kind = next((_KINDS[name] for name in names if name in _KINDS), FailureKind.LAUNCH)
    return Failed(kind, one_line(error))


def is_sticky(error: Exception) -> bool:
    """Say whether the CUDA context is lost: every later call in this process would fail with the same error."""
    text = str(error).lower()
    return type(error).__name__ == "DeviceHungError" or any(words in text for words in _STICKY)


_SHELL_SIGNAL = 128  # plus its number: the exit code that a shell or a container makes of a signal
_SAID_CHARACTERS = 160


def dead(exit_code: int | None, said: str) -> Failed:
    r"""Return the failed trial whose GPU process ended by itself.

    >>> dead(-6, "terminate called\n  what():  CUDA error: device-side assert\n").reason
    'its GPU process was killed by signal 6 (SIGABRT): what():  CUDA error: device-side assert'

    Args:
        exit_code: as subprocess counts it: negative for a signal; None where nobody knows.
        said: the end of what it printed.
    """
    if exit_code is None:
        return Failed(FailureKind.LAUNCH, f"its GPU process ended{_last_words(said)}")
    killed_by = -exit_code if exit_code < 0 else exit_code - _SHELL_SIGNAL
    if killed_by == signal.SIGKILL:
        reason = "its GPU process was killed by signal 9 (SIGKILL), which Linux sends when the host's memory runs out"
        return Failed(FailureKind.RESOURCES, reason)
    names = {number.value: number.name for number in signal.Signals}
    how = (
        f"was killed by signal {killed_by} ({names[killed_by]})"
        if killed_by in names
        else f"exited with code {exit_code}"
    )
    return Failed(FailureKind.LAUNCH, f"its GPU process {how}{_last_words(said)}")


def silent(limit_s: float) -> Failed:
    """Return the failed trial that had no answer within ``limit_s``."""
    return Failed(FailureKind.TIMEOUT, f"did not end within {limit_s:g} s; its GPU process was killed")


def torn(why: str) -> Failed:
    """Return the failed trial whose GPU process answered nonsense."""
    return Failed(FailureKind.LAUNCH, f"its GPU process broke off its answer: {why}")


def _last_words(said: str) -> str:
    """Return the line that says most, the last one of those that name an error if there are any."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
    found = (telling or lines or [""])[-1]
    return f": {found[:_SAID_CHARACTERS]}" if found else ""
