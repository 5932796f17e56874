"""The real command while another sweep has its GPU; there is none here, so the question which GPU it is has a made-up answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moetune.measure.gpu_lock import locked
from moetune.measure.gpu_name import Gpu

GPU = Gpu(name="NVIDIA H200", index=0, uuid="GPU-1234")
SWEEP = """
from moetune import tuning
from moetune.measure.gpu_name import Gpu

tuning._gpu_is_there = lambda: True
tuning.gpu_of = lambda index: Gpu(name="NVIDIA H200", index=index, uuid="GPU-1234")
from moetune.cli.main import main
main()
"""


@pytest.fixture
def waiting(tmp_path):
    """Start a sweep on a GPU that this process has locked; return it once it has said that it waits, and what it said."""
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    environment = dict(os.environ, PYTHONPATH=paths, XDG_STATE_HOME=str(tmp_path))
    command = [sys.executable, "-c", SWEEP, "sweep", "--model", "mixtral-8x7b", "--out", str(tmp_path / "tables")]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with locked(GPU, [tmp_path / "moetune" / "locks"], pytest.fail, pytest.fail):
        process = subprocess.Popen(command, env=environment, **pipes)
        yield process, process.stderr.readline()
        process.kill()
        process.communicate(timeout=60)


def test_it_says_in_one_plain_line_which_process_has_the_gpu(waiting):
    _, said = waiting
    assert said.startswith(f"waiting for NVIDIA H200 (GPU-1234), which is in use by process {os.getpid()}, since 20")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_can_be_stopped_while_it_waits(waiting, tmp_path, how, code):
    process, _ = waiting
    started = children_of(process.pid)
    assert len(started) == 2  # what will compile and what will have the GPU: they import while it waits
    process.send_signal(how)
    printed, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert printed == ""
    assert "Traceback" not in said
    assert not (tmp_path / "tables").exists()
    assert [entry.name for entry in (tmp_path / "moetune").iterdir()] == ["locks"]  # no store was touched
    deadline = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < deadline, started
        time.sleep(0.05)


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
