"""What every test can rely on: its own Triton cache, no tables of the user's, and fresh memory that is NaN on request."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Set before anything imports triton, and inherited by processes that tests start.
os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / ".triton-cache"))
os.environ.setdefault("MPLBACKEND", "Agg")
# Seconds per test; read by pytest-timeout where it is installed, so that a hang is a failure with a stack.
os.environ.setdefault("PYTEST_TIMEOUT", "300")


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
            if fresh.is_floating_point() and fresh.device.type != "meta":
                fresh.fill_(float("nan"))
            return fresh

        return allocate_poisoned

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
