"""Which journal a store uses, and that a store without a write-ahead log is as safe."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from moetune.store import Store, StoreError, database, journal
from moetune.store.journal import file_system, use_best_journal
from tests.store.test_store import SHAPE, TRIALS, fill, provenance

MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:50 / /home rw,relatime shared:1 - nfs4 server:/home rw,vers=4.2
31 30 0:51 / /home/local\\040disk rw - xfs /dev/sdb1 rw
32 22 0:52 / /data rw - tmpfs tmpfs rw
33 22 0:53 / /data rw - fuse.sshfs host: rw
a line that means nothing
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trials.sqlite"


@pytest.fixture
def on_network(monkeypatch):
    monkeypatch.setattr(journal, "file_system", lambda path: "nfs4")


def environment():
    paths = [str(Path(__file__).parent), *sys.path]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in paths if entry))


def mode_of(path):
    connection = sqlite3.connect(path)
    mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    connection.close()
    return mode


@pytest.mark.parametrize(
    ("place", "kind", "logged"),
    [
        ("/var/lib/trials.sqlite", "ext4", True),
        ("/home/me/.local/state/moetune/trials.sqlite", "nfs4", False),
        ("/home/local disk/trials.sqlite", "xfs", True),
        ("/data/trials.sqlite", "fuse.sshfs", False),
        ("/homework/trials.sqlite", "ext4", True),
    ],
)
def test_the_innermost_and_latest_mount_decides(monkeypatch, tmp_path, place, kind, logged):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(journal, "MOUNTS", tmp_path / "mountinfo")
    assert file_system(Path(place)) == kind
    assert journal.suits_write_ahead_log(Path(place)) is logged


def test_where_the_kernel_does_not_say_nothing_is_assumed(monkeypatch, tmp_path, path):
    monkeypatch.setattr(journal, "MOUNTS", tmp_path / "nothing")
    assert file_system(path) == "unknown"
    fill(path, provenance())
    assert mode_of(path) == "delete"


def test_a_link_into_a_network_home_counts_as_one(monkeypatch, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "home")
    (tmp_path / "mountinfo").write_text(f"1 0 8:1 / / rw - ext4 a rw\n2 1 0:9 / {tmp_path}/home rw - nfs a rw\n")
    monkeypatch.setattr(journal, "MOUNTS", tmp_path / "mountinfo")
    assert file_system(tmp_path / "link" / "trials.sqlite") == "nfs"


def test_a_local_disk_gets_the_log(monkeypatch, path):
    monkeypatch.setattr(journal, "file_system", lambda path: "ext4")
    fill(path, provenance())
    assert mode_of(path) == "wal"


def test_a_network_home_gets_the_rollback_journal_and_every_commit_waits_for_the_disk(on_network, path):
    with Store(path) as store:
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        run = store.begin(provenance(), "moetune sweep")
        for trial in TRIALS:
            run.record(trial)
            assert not path.with_name(f"{path.name}-wal").exists()
    assert mode_of(path) == "delete"
    before = path.read_bytes(), sorted(path.parent.iterdir())
    with Store.to_read(path) as store:
        assert [row.trial for row in store.rows(SHAPE)] == list(TRIALS)
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == before


def test_a_store_that_moves_to_a_network_home_changes_its_journal(monkeypatch, path):
    fill(path, provenance())
    assert mode_of(path) == "wal"
    monkeypatch.setattr(journal, "file_system", lambda path: "nfs4")
    fill(path, provenance())
    assert mode_of(path) == "delete"


def test_a_log_that_another_sweep_has_open_serves_both(monkeypatch, path):
    with Store(path):
        monkeypatch.setattr(journal, "file_system", lambda path: "nfs4")
        fill(path, provenance())
    assert mode_of(path) == "wal"


def test_a_file_layer_without_a_log_falls_back(path):
    """SQLite's own locks by file know no shared memory, as on a disk that cannot map any: it answers with `delete`."""
    where = f"{path.absolute().as_uri()}?vfs=unix-dotfile"
    connection = sqlite3.connect(where, uri=True, isolation_level=None)
    database.bring_up_to_date(connection, path)
    assert use_best_journal(connection, path) == "delete"
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    with Store(path, connection) as store:
        run = store.begin(provenance(), "moetune sweep")
        for trial in TRIALS:
            run.record(trial)
        assert [row.trial for row in store.rows(SHAPE)] == list(TRIALS)


@pytest.mark.parametrize("kind", ["ext4", "nfs4"])
def test_another_process_that_writes_for_ever_is_one_sentence(monkeypatch, path, kind):
    monkeypatch.setattr(journal, "file_system", lambda path: kind)
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.1)
    fill(path, provenance())
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"), Store(path) as store:
        store.begin(provenance(), "moetune sweep")
    other.execute("ROLLBACK")
    other.close()


WRITER = """
import sys
from pathlib import Path
from test_store import TRIALS, fill, provenance
from moetune.store import journal
journal.file_system = lambda path: sys.argv[2]
fill(Path(sys.argv[1]), provenance(), TRIALS * 75)
"""


@pytest.mark.parametrize("kind", ["ext4", "nfs4"])
def test_sweeps_that_write_one_store_at_once_lose_no_trial(path, kind):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), kind], stderr=subprocess.PIPE, env=environment())
        for _ in range(2)
    ]
    said = [writer.communicate(timeout=120)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], said
    with Store.to_read(path) as store:
        rows = store.rows(SHAPE)
        for run in store.runs():
            assert [row.trial for row in rows if row.run == run.run] == [*TRIALS] * 75
        assert len(rows) == 2 * 75 * len(TRIALS)
    assert mode_of(path) == ("wal" if kind == "ext4" else "delete")


KILLED = """
import os, signal, sqlite3, sys
from pathlib import Path
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size=5")  # so that pages reach the file before the commit
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE trials SET outcome = outcome || zeroblob(3000)")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_sweep_left_in_the_rollback_journal_is_undone_by_the_next_reader(on_network, path):
    fill(path, provenance(), TRIALS * 20)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=environment(), timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.with_name(f"{path.name}-journal").exists()
    with Store.to_read(path) as store:
        assert [row.trial for row in store.rows(SHAPE)] == [*TRIALS] * 20
    assert not path.with_name(f"{path.name}-journal").exists()
