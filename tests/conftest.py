"""What every test can rely on: the right kind of process, its own Triton cache, none of the user's tables.

A function that Triton's interpreter has wrapped can no longer be compiled, so interpreter and offline tests need processes
of their own; each says so, and how to start it, where it is skipped.
"""

from __future__ import annotations

import os
import signal
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Set before anything imports triton, and inherited by processes that tests start.
os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / ".triton-cache"))
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as moetune.__main__ does, and for its reason
# Seconds per test; read by pytest-timeout where it is installed, so that a hang is a failure with a stack.
os.environ.setdefault("PYTEST_TIMEOUT", "300")

# `nohup` and the background of a script have a process and its children ignore these, which tests send to both. With a
# handler of its own this process still outlives a hangup, and its children start with the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:  # a nightly torch brings it under another name
        return "unknown"


def pytest_configure():
    """Refuse to call it a test of one Triton when another is loaded: `make other-tritons` swaps it through the path."""
    wanted, found = os.environ.get("EXPECTED_TRITON"), _triton()
    if wanted not in (None, found):
        raise pytest.UsageError(f"expected triton {wanted}, found {found}")


def pytest_report_header():
    """Name the Triton that these tests see."""
    return f"triton {_triton()}{' (interpreter)' if INTERPRETED else ''}"


def _why_not_gpu() -> str | None:
    if INTERPRETED:
        return "GPU tests never run in Triton's interpreter: unset TRITON_INTERPRET"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA GPU, and torch sees none"


WHY_NOT = {
    ROOT / "tests" / "interpreter": lambda: None if INTERPRETED else "needs TRITON_INTERPRET=1: `make interpreter`",
    ROOT / "tests" / "offline": lambda: (
        "nothing compiles under TRITON_INTERPRET=1: `make offline`" if INTERPRETED else None
    ),
    ROOT / "tests" / "gpu": _why_not_gpu,
}


def pytest_collection_modifyitems(items):
    """Mark the GPU tests, and skip what cannot run in this process, with the reason."""
    for folder, why_not in WHY_NOT.items():
        here = [item for item in items if folder in item.path.parents]
        reason = why_not() if here else None
        for item in here:
            if folder.name == "gpu":
                item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _no_traces_of_the_user(tmp_path_factory):
    """Point every per-user folder at an empty one and drop moetune's own settings, also for started processes."""
    home = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MOETUNE_")]:
            patch.delenv(name)
        for name in ("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
            patch.setenv(name, str(home / name.lower()))
        yield


@pytest.fixture
def poisoned_memory(monkeypatch, request):
    """Fill fresh floating-point memory with NaN, so that a row which no kernel writes shows in every comparison.

    Integers stay as they are: they have no NaN. A test that counts launches or bytes is marked ``plain_memory``.
    """
    if request.node.get_closest_marker("plain_memory"):
        return
    import torch

    def poisoned(allocate):
        def allocate_poisoned(*args, **kwargs):
            fresh = allocate(*args, **kwargs)
            if fresh.is_floating_point() and fresh.device.type != "meta" and not fresh.requires_grad:
                fresh.fill_(float("nan"))
            return fresh

        return allocate_poisoned

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
