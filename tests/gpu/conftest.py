"""Tests on a real GPU. `make gpu` runs them; elsewhere they are skipped with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _why_skipped() -> str | None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "GPU tests never run in Triton's interpreter: unset TRITON_INTERPRET"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA GPU, and torch sees none"


def pytest_collection_modifyitems(items):
    """Mark everything here ``gpu``, and skip it where there is no GPU."""
    here = [item for item in items if HERE in item.path.parents]
    reason = _why_skipped() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(poisoned_memory):
    """Every GPU test allocates NaN."""
