"""Kernels in Triton's interpreter: a process of its own, because wrapped functions can no longer be compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Skip this folder, with the way to run it, in a process that was not started for it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1 from the start: `make interpreter`"))


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(poisoned_memory):
    """Every interpreter test allocates NaN."""
