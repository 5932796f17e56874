"""Lets these tests, and the processes that they start, import the GPU of ``planted_gpu.py``, and ends what it leaves."""

from __future__ import annotations

import os
import sys
import tempfile
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


@pytest.fixture(scope="session")
def built_fake(tmp_path_factory):
    """Compile the library that plays CUPTI's part."""
    import cupti_c

    folder = tmp_path_factory.mktemp("fake")
    return cupti_c.compile_c(cupti_c.SOURCE.read_text(), folder, "-shared", "-fPIC", name="fake_cupti.so")


@pytest.fixture
def fake(built_fake, tmp_path):
    """A copy for each test: the loader gives the same library for the same file, and its state.

    It is not called libcupti, or whoever looks for one in this process from now on would find it loaded.
    """
    import cupti_c

    path = tmp_path / built_fake.name
    path.write_bytes(built_fake.read_bytes())
    return cupti_c.Fake(path)


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Put a script named ncu on PATH; its body can ``wait`` for jobs, ``count`` them, and run ``program``."""
    import fake_ncu

    from moetune.measure import ncu

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(ncu, "blocked", lambda: None)
    yield lambda body: fake_ncu.install(tmp_path, body)
    tempfile.tempdir = None
