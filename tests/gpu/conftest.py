"""Tests on a real GPU (`make gpu`), where every fresh float is NaN."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(poisoned_memory):
    """Every GPU test allocates NaN."""
