"""Lets these tests, and the processes that they start, import the small kernel in ``toy.py``; one pool for all layers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def compile_layer():
    """Return a function that compiles ``(role, config)`` choices of a shape for a device, in one pool per session."""
    from moetune.measure.compiler import CompilePool, usable_cores
    from moetune.measure.kernel_jobs import PRELOAD, gemm_job

    with CompilePool(workers=usable_cores(), preload=PRELOAD) as pool:

        def compile_layer(shape, device, choices):
            return list(pool.compile((choice, gemm_job(*choice, shape, device)) for choice in choices))

        yield compile_layer
