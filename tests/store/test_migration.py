"""A store of the first version, made by the statements that version had, is read as it is and migrated when written."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from moetune.store import Store, StoreError, schema
from moetune.store.codec import choice_text, dump, trial_to_json
from moetune_kernels import __version__
from tests.store.test_store import SHAPE, TRIALS, fill, provenance

FIRST_VERSION = """
CREATE TABLE IF NOT EXISTS runs (
    id TEXT PRIMARY KEY, provenance TEXT NOT NULL, backend TEXT NOT NULL, shape_key TEXT NOT NULL, shape TEXT NOT NULL,
    device TEXT NOT NULL, kernels_sha256 TEXT NOT NULL, triton TEXT NOT NULL, torch TEXT NOT NULL, driver TEXT NOT NULL,
    ceilings TEXT, command TEXT NOT NULL, started_at TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS runs_by_provenance ON runs (provenance);
CREATE TABLE IF NOT EXISTS trials (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL REFERENCES runs (id), tokens INTEGER NOT NULL, subject TEXT NOT NULL,
    choice TEXT NOT NULL, stage TEXT NOT NULL, outcome TEXT NOT NULL, compiled TEXT, verified INTEGER NOT NULL,
    ended_at TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS trials_by_run ON trials (run, tokens);
CREATE TABLE IF NOT EXISTS bounds (
    run TEXT NOT NULL REFERENCES runs (id), tokens INTEGER NOT NULL, bound_us REAL NOT NULL, PRIMARY KEY (run, tokens)
);
PRAGMA user_version=1;
"""


@pytest.fixture
def old(tmp_path):
    """Make a store of version 1 with one run of all trials; return its path."""
    path = tmp_path / "trials.sqlite"
    made_for = provenance()
    shape, device = dump(made_for.shape.to_json()), dump(made_for.device.to_json())
    connection = sqlite3.connect(path)
    connection.executescript(FIRST_VERSION)
    texts = (made_for.kernels_sha256, made_for.triton, made_for.torch, made_for.driver)
    run = (
        "a" * 32,
        made_for.key,
        "cuda",
        SHAPE.key,
        shape,
        device,
        *texts,
        None,
        "moetune sweep",
        "2026-01-01T00:00:00",
    )
    connection.execute(f"INSERT INTO runs VALUES ({', '.join('?' * 13)})", run)
    for trial in TRIALS:
        value = trial_to_json(trial)
        compiled = None if trial.compiled is None else dump(value["compiled"])
        row = (
            "a" * 32,
            trial.tokens,
            value["subject"],
            choice_text(trial.choice),
            value["stage"],
            dump(value["outcome"]),
        )
        connection.execute(
            "INSERT INTO trials (run, tokens, subject, choice, stage, outcome, compiled, verified, ended_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, '2026-01-01T00:00:01')",
            (*row, compiled, int(trial.verified)),
        )
    connection.commit()
    connection.close()
    return path


def columns(path):
    connection = sqlite3.connect(path)
    tables = ("runs", "trials", "bounds")
    found = {table: connection.execute(f"PRAGMA table_info({table})").fetchall() for table in tables}
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    connection.close()
    return found, version


def test_a_store_of_the_first_version_is_read_as_it_is(old):
    before = old.read_bytes()
    with Store.to_read(old) as store:
        assert [row.trial for row in store.rows(SHAPE)] == list(TRIALS)
        (run,) = store.runs()
        assert (run.run, run.moetune, run.gpu, run.ended_at) == ("a" * 32, None, None, None)
    assert old.read_bytes() == before


def test_writing_migrates_it_and_every_trial_still_counts(old, tmp_path):
    with Store(old) as store:
        assert set(store.known(provenance())) == {(t.subject, t.tokens, t.choice) for t in TRIALS[:3]}
        run = store.begin(provenance(), "moetune sweep", "GPU-1")
        run.record(TRIALS[0])
        run.end()
        assert [row.trial for row in store.rows(SHAPE)] == [*TRIALS, TRIALS[0]]
        first, second = store.runs()
        assert (first.moetune, first.gpu, first.ended_at) == (None, None, None)
        assert (second.moetune, second.gpu) == (__version__, "GPU-1")
        assert second.ended_at >= second.started_at
    fill(tmp_path / "fresh.sqlite", provenance())
    assert columns(old) == columns(tmp_path / "fresh.sqlite")
    assert columns(old)[1] == schema.SCHEMA_VERSION


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_migration_that_is_cut_short_leaves_the_old_store(old, monkeypatch, failing):
    steps = (
        *schema._STEPS[1][: failing - 1],
        "ALTER TABLE nothing ADD COLUMN broken TEXT",
        *schema._STEPS[1][failing:],
    )
    before = columns(old)
    with monkeypatch.context() as patch:
        patch.setattr(schema, "_STEPS", {1: steps})
        with pytest.raises(StoreError):
            Store(old)
    assert columns(old) == before
    with Store(old) as store:
        assert len(store.rows(SHAPE)) == len(TRIALS)


KILLED = """
import os, signal, sys
from pathlib import Path
from moetune.store import Store, schema

def kill(connection, statements):
    for statement in statements[:2]:
        connection.execute(statement)
    os.kill(os.getpid(), signal.SIGKILL)

schema._run = kill
Store(Path(sys.argv[1]))
"""


def test_a_process_killed_in_the_middle_of_a_migration_loses_nothing(old):
    before = columns(old)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(old)],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry)),
        timeout=60,
        check=False,
    )
    assert killed.returncode == -9
    assert columns(old) == before
    with Store(old) as store:
        assert len(store.rows(SHAPE)) == len(TRIALS)


def test_a_store_that_was_only_just_made_is_empty(tmp_path):
    """What a sweep leaves that is killed between making the file and making its tables."""
    path = tmp_path / "trials.sqlite"
    path.touch()
    with Store.to_read(path) as store:
        assert (store.runs(), store.rows(SHAPE)) == ([], [])
        with pytest.raises(StoreError):
            store.begin(provenance(), "moetune sweep")
    assert path.read_bytes() == b""
    fill(path, provenance())
    with Store.to_read(path) as store:
        assert len(store.rows(SHAPE)) == len(TRIALS)


def test_foreign_tables_are_not_migrated(tmp_path):
    path = tmp_path / "runs.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE runs (distance TEXT)")
    connection.execute("PRAGMA user_version=1")
    connection.commit()
    connection.close()
    before = Path(path).read_bytes()
    with pytest.raises(StoreError, match="is no trial store"):
        Store(path)
    assert Path(path).read_bytes() == before
