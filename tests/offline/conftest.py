"""Kernels compiled for GPUs that are not here: never in the interpreter's process."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_report_header():
    """Show which Triton compiles; `make other-tritons` swaps it through the path."""
    return f"triton {version('triton')}"


def pytest_configure():
    """Refuse to call it a test of one Triton when another is loaded."""
    wanted, found = os.environ.get("EXPECTED_TRITON"), version("triton")
    if wanted not in (None, found):
        raise pytest.UsageError(f"expected triton {wanted}, found {found}")


def pytest_collection_modifyitems(items):
    """Skip this folder in the interpreter's process."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="nothing compiles under TRITON_INTERPRET=1: `make offline`"))
