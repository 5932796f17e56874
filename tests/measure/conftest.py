"""Lets these tests, and the processes that they start, import the GPU of ``planted_gpu.py``, and ends what it leaves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import planted_gpu


@pytest.fixture
def isolated(tmp_path, monkeypatch):
    """Return a function that opens an isolated backend on a planted GPU; afterwards no process of it may be left."""
    from moetune.measure import gpu_respawn

    monkeypatch.setattr(gpu_respawn, "PAUSE_S", 0.0)
    opened = []

    def isolated(*deeds, **options):
        backend = planted_gpu.open_backend(tmp_path, *deeds, **options)
        opened.append(backend)
        return backend

    yield isolated
    for backend in opened:
        backend.close()
    assert planted_gpu.alive(tmp_path) == []


@pytest.fixture
def diary(tmp_path):
    """Return a function that reads what the planted GPU's processes were asked."""
    return lambda method=None: planted_gpu.read_diary(tmp_path, method)
