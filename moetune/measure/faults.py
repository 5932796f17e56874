"""Turn what a kernel launch may raise into a failed trial, and tell a bad kernel from a lost device."""

from __future__ import annotations

from moetune.measure.compile_worker import one_line
from moetune.outcome import Failed, FailureKind

# By name, so that neither torch nor triton must be imported to judge; each Triton release moves some of them.
_KINDS = {
    "OutOfResources": FailureKind.RESOURCES,
    "OutOfMemoryError": FailureKind.RESOURCES,
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
