"""Files that appear whole or not at all, also when their writer is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from moetune.whole_file import whole_file, write_whole

KILLED = """
import os, signal, sys
from pathlib import Path
from moetune.whole_file import whole_file
with whole_file(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("written", flush=True)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.readline()
"""


def start(path, what):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", KILLED, str(path), what], env=environment, **pipes)


def test_a_file_is_written_with_its_folder_for_everyone_to_read(tmp_path):
    path = tmp_path / "deep" / "table.json"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_in_the_block_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "table.json"
    write_whole(path, b"old")

    def half_written():
        with whole_file(path) as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        half_written()
    assert [(entry, entry.read_bytes()) for entry in tmp_path.iterdir()] == [(path, b"old")]


def test_what_killed_writers_leave_goes_with_the_next_write(tmp_path):
    path = tmp_path / "table[1].json"  # a name that is a pattern too
    write_whole(path, b"old")
    for _ in range(3):
        with start(path, "die") as writer:
            assert writer.wait(timeout=60) == -signal.SIGKILL
        assert path.read_bytes() == b"old"
        assert len(list(tmp_path.iterdir())) == 2  # never more than the last one's
    write_whole(path, b"new")
    assert [(entry, entry.read_bytes()) for entry in tmp_path.iterdir()] == [(path, b"new")]


def test_the_unfinished_file_of_a_writer_that_lives_stays(tmp_path):
    path = tmp_path / "table.json"
    with start(path, "wait") as writer:
        assert writer.stdout.readline() == "written\n"
        write_whole(path, b"quick")
        assert path.read_bytes() == b"quick"
        writer.communicate("go on\n", timeout=60)
        assert writer.returncode == 0
    assert [(entry, entry.read_bytes()) for entry in tmp_path.iterdir()] == [(path, b"half")]


def test_a_file_that_is_taken_for_a_dead_writers_is_made_again(tmp_path, monkeypatch):
    """Between making a file and locking it another writer may remove it."""
    import fcntl

    path, real, removed = tmp_path / "table.json", fcntl.flock, []

    def remove_the_first(descriptor, how):
        if how == fcntl.LOCK_EX and not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", remove_the_first)
    write_whole(path, b"new")
    assert len(removed) == 1
    assert [(entry, entry.read_bytes()) for entry in tmp_path.iterdir()] == [(path, b"new")]
