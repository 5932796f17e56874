"""A command on a leash ends with all that it started: with its owner, however that ends, and at its time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from moetune.measure.leash import PULLED

LEASH = [sys.executable, "-P", "-m", "moetune.measure.leash"]
# Two levels, the lower in a session of its own, where no signal to a process group reaches it.
FAMILY = """
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
grandchild = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", grandchild], start_new_session=True)
(folder / "part").write_text(f"{os.getpid()} {child.pid}")
(folder / "part").rename(folder / "pids")
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""
OWNER = """
import subprocess, sys, time
subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
time.sleep(600)
"""


def environment():
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def on_a_leash(folder, limit_s, sleeps_s=600.0):
    return [*LEASH, str(limit_s), str(folder), sys.executable, "-c", FAMILY, str(folder.parent), str(sleeps_s)]


def family(tmp_path, within_s=60.0):
    """Wait until the command has started its child and return both process ids."""
    deadline = time.monotonic() + within_s
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < deadline, "the command never started"
        time.sleep(0.01)
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def left(pids, within_s=30.0):
    """Return who of ``pids`` still runs after a while."""
    deadline = time.monotonic() + within_s
    while (alive := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


@pytest.fixture
def started():
    """Start commands whose input is a pipe; the pipes are closed afterwards."""
    with ExitStack() as stack:

        def start(command):
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, env=environment(), stdin=pipe, stderr=pipe, start_new_session=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "folder"
    made.mkdir()
    return made


def test_a_killed_owner_takes_everything_with_it_and_its_folder(started, folder, tmp_path):
    owner = started([sys.executable, "-c", OWNER, *on_a_leash(folder, 600)])
    pids = family(tmp_path)
    assert left(pids, 0.0) == pids
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert left(pids) == []
    deadline = time.monotonic() + 30.0
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not folder.exists()


@pytest.mark.parametrize("how", ["let-go", "terminate"])
def test_an_owner_that_lets_go_or_asks_ends_it(started, folder, tmp_path, how):
    leash = started(on_a_leash(folder, 600))
    pids = family(tmp_path)
    leash.stdin.close() if how == "let-go" else leash.terminate()
    assert leash.wait(60.0) == PULLED
    assert left(pids) == []
    assert not folder.exists()


def test_time_runs_out_whatever_the_owner_does(started, folder, tmp_path):
    leash = started(on_a_leash(folder, 5.0))  # enough for its two processes to start
    pids = family(tmp_path)
    assert leash.wait(60.0) == PULLED
    assert left(pids) == []


def test_a_command_that_ends_gives_its_exit_code_leaves_the_folder_and_no_child(started, folder, tmp_path):
    leash = started(on_a_leash(folder, 600, 0.0))
    pids = family(tmp_path)
    assert leash.wait(60.0) == 7
    assert left(pids) == []
    assert folder.exists()  # what the command wrote there is still to be read


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["/nowhere/ncu"], 1, "/nowhere/ncu could not be started: No such file or directory"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"], 128 + 11, ""),
        ([sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()))"], 0, ""),  # no input of its own
    ],
    ids=["missing", "signal", "no-input"],
)
def test_it_exits_as_the_command_did(started, folder, command, code, says):
    done = started([*LEASH, "60", str(folder), *command])
    assert done.wait(60.0) == code
    assert done.stderr.read().decode().strip() == says
