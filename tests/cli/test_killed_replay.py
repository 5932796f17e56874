"""The real command, killed with SIGKILL at twenty moments of a replay: the same command then ends as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from moetune_kernels.table import TunedTable

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path("nvidia_h200", "e8_h4096_i14336_k2_bf16.json")
TOKENS = (1, 16)
TIMED_KILLS, COUNTED_KILLS = 10, 4
# The n-th time that the table is written: once per token count, and at the end. Before the disk has it, before it takes
# its place, and after.
WRITES = [(1, "fsync"), (1, "chmod"), (2, "chmod"), (2, "replaced"), (3, "fsync"), (3, "replaced")]
DRIVER = """
import os, signal, sys
from pathlib import Path

number, where = int(sys.argv.pop(1)), sys.argv.pop(1)
left = {name: number for name in ("fsync", "chmod", "replaced", "recorded")}

def dying(name, real, after=False):
    def call(*args, **kwargs):
        result = real(*args, **kwargs) if after else None
        left[name] -= 1
        if name == where and left[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result if after else real(*args, **kwargs)
    return call

os.fsync = dying("fsync", os.fsync)
Path.chmod = dying("chmod", Path.chmod)
Path.replace = dying("replaced", Path.replace, after=True)
from moetune.cli.main import main
from moetune.store import Run
Run.record = dying("recorded", Run.record, after=True)
main()
"""


class Folder:
    """Where one command line sweeps, over and over."""

    def __init__(self, path):
        self.path = path
        self.table, self.store = path / TABLE, path / "trials.sqlite"

    def start(self, *program):
        """Start the sweep in a process of its own, without a GPU."""
        tokens = ",".join(map(str, TOKENS))
        sweep = ["sweep", "--model", "mixtral-8x7b", "--tokens", tokens, "--out", str(self.path)]
        paths = [str(ROOT), str(ROOT / "kernels"), *(entry for entry in sys.path if entry)]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), CUDA_VISIBLE_DEVICES="")
        command = [sys.executable, *(program or ("-m", "moetune")), *sweep, "--store", str(self.store)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)

    def finish(self):
        """Run the sweep to its end; return its seconds."""
        began_s = time.monotonic()
        process = self.start()
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said.decode()
        return time.monotonic() - began_s

    def kill_after(self, seconds):
        """Start the sweep and kill it after so many seconds; sooner where the machine is quicker now than it was."""
        process = self.start()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=seconds)
            return self.kill_after(0.8 * seconds)
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        return None

    def check_after_a_kill(self, whole):
        """See that the store is sound, that a table that is there is whole, and that next to nothing else lies about."""
        if self.store.exists():
            with closing(sqlite3.connect(self.store)) as connection:
                assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        if self.table.exists():
            assert_whole(self.table.read_bytes(), whole)
        unfinished = [path for path in self.path.rglob("*") if path.is_file() and not path.name.startswith("trials")]
        assert len(unfinished) <= 2, unfinished  # the table, and what the last writer left

    def trials(self):
        with closing(sqlite3.connect(self.store)) as connection:
            rows = "tokens, subject, choice, stage, outcome, compiled, verified"
            return connection.execute(f"SELECT {rows} FROM trials ORDER BY id").fetchall()

    def files(self):
        return sorted(path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file())


def assert_whole(content, whole):
    """See that a table is one that the runtime reads, with entries as an unbroken sweep has them, ranges aside."""
    table = TunedTable.parse(content, "the table")
    assert table.faults == ()
    assert set(table.entries) <= set(whole.entries)
    for tokens, entry in table.entries.items():
        assert (entry.plan, entry.median_us) == (whole.entries[tokens].plan, whole.entries[tokens].median_us)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Run the sweep once undisturbed, after another that filled the caches; return its folder and its seconds."""
    folder = Folder(tmp_path_factory.mktemp("unbroken"))
    folder.finish()
    return folder, folder.finish()


@pytest.fixture
def watched(tmp_path):
    """Return a folder and the set of all contents that its table ever had, read over and over by a thread."""
    folder, seen, ended = Folder(tmp_path / "killed"), set(), threading.Event()

    def watch():
        while not ended.wait(0.002):
            if folder.table.exists():
                seen.add(folder.table.read_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield folder, seen
    ended.set()
    watcher.join()


@pytest.mark.timeout(600)
def test_a_replay_killed_at_twenty_moments_ends_as_if_nothing_had_been(unbroken, watched):
    (reference, lasts_s), (folder, seen) = unbroken, watched
    whole = TunedTable.parse(reference.table.read_bytes(), "the unbroken table")
    assert tuple(whole.entries) == TOKENS
    draw = random.Random(9)
    for part in range(TIMED_KILLS):
        folder.kill_after(lasts_s * (part + draw.random()) / TIMED_KILLS)
        folder.check_after_a_kill(whole)
    trials = len(reference.trials())
    counted = [draw.randrange(1, trials) for _ in range(COUNTED_KILLS)]
    for number, where in [*((count, "recorded") for count in counted), *WRITES]:
        process = folder.start("-c", DRIVER, str(number), where)
        _, said = process.communicate(timeout=240)
        assert process.returncode == -signal.SIGKILL, (number, where, said.decode())
        folder.check_after_a_kill(whole)
        if where == "recorded":
            assert len(folder.trials()) == number  # each one was safe as it ended
    folder.finish()
    assert folder.table.read_bytes() == reference.table.read_bytes()
    assert folder.files() == reference.files() == [TABLE, Path("trials.sqlite")]
    assert folder.trials() == reference.trials() != []
    assert len(seen) > 1  # interim tables were seen, not only the last one
    for content in seen:
        assert_whole(content, whole)
