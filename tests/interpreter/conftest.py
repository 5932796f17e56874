"""Kernels in Triton's interpreter (`make interpreter`), where every fresh float is NaN."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(poisoned_memory):
    """Every interpreter test allocates NaN."""
