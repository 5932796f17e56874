from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.outcome import Compiled, Failed, FailureKind, Figure, Measured, Source, Stage, Subject, Trial
from moetune.store import Provenance, Store, StoreError, default_store_path, latest
from moetune.store.schema import SCHEMA_VERSION
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=1024, inter=512, local_experts=8, top_k=2)
CONFIG = MoEKernelConfig(structure=Structure.TMA, block_m=64, block_n=128, block_k=64, max_registers=168, group_m=8)
PLAN = LayerPlan(gate_up=CONFIG, down=replace(CONFIG, block_n=256))
COMPILED = Compiled(
    registers=168, spills=0, smem_bytes=98304, block_size=128, loop_instructions=210, tensor_instruction="HGMMA"
)
MEASURED = Measured(
    median_us=123.4567,
    spread_us=0.5,
    samples=25,
    flops_per_byte=Figure(16.5, Source.ANALYTICAL),
    bandwidth_gbps=Figure(4100.0, Source.COUNTER),
    issue_efficiency=Figure.unavailable("no clock is known"),
)
TRIALS = (
    Trial(subject=Subject.GATE_UP, tokens=16, choice=CONFIG, stage=Stage.SCREEN, outcome=MEASURED, compiled=COMPILED),
    Trial(
        subject=Subject.DOWN,
        tokens=0,
        choice=CONFIG,
        stage=Stage.SCREEN,
        outcome=Failed(FailureKind.COMPILE, "PassManager::run failed"),
    ),
    Trial(subject=Subject.ROUTING, tokens=16, choice=64, stage=Stage.SCREEN, outcome=MEASURED),
    Trial(subject=Subject.LAYER, tokens=16, choice=PLAN, stage=Stage.FINAL, outcome=MEASURED, verified=True),
)


def provenance(**changes):
    fields = {"backend": "cuda", "kernels_sha256": "0" * 64, "triton": "3.6.0", "torch": "2.11.0", "driver": "580.1"}
    return replace(Provenance(shape=SHAPE, device=TARGETS["sm_90"], **fields), **changes)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "trials.sqlite"


def fill(path, made_for, trials=TRIALS):
    with Store(path) as store:
        run = store.begin(made_for, "moetune sweep --model tiny")
        for trial in trials:
            run.record(trial)
        run.record_bound(16, 100.5)
        run.record_ceilings(4.2e12, 7.8e14)


def test_every_trial_comes_back_as_it_went_in(path):
    fill(path, provenance())
    with Store(path) as store:
        rows = store.rows(SHAPE, TARGETS["sm_90"])
        assert [row.trial for row in rows] == list(TRIALS)
        assert {(row.shape, row.device, row.triton, row.backend) for row in rows} == {
            (SHAPE, TARGETS["sm_90"], "3.6.0", "cuda")
        }
        assert store.bounds(provenance()) == {16: 100.5}
        (run,) = store.runs()
        assert run.ceilings == {"bytes_per_s": 4.2e12, "flops": 7.8e14}
        assert run.command == "moetune sweep --model tiny"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"kernels_sha256": "1" * 64}, id="other-kernels"),
        pytest.param({"triton": "3.7.0"}, id="other-triton"),
        pytest.param({"driver": "590.0"}, id="other-driver"),
        pytest.param({"device": TARGETS["sm_80"]}, id="other-device"),
        pytest.param({"device": replace(TARGETS["sm_90"], mig="1g.18gb")}, id="a-slice-of-the-device"),
        pytest.param({"shape": replace(SHAPE, top_k=4)}, id="other-shape"),
        pytest.param({"shape": replace(SHAPE, experts=64)}, id="same-shape-among-more-experts"),
        pytest.param({"backend": "replay"}, id="replayed"),
    ],
)
def test_only_trials_of_equal_provenance_spare_a_measurement(path, change):
    fill(path, provenance())
    with Store(path) as store:
        assert set(store.known(provenance())) == {(t.subject, t.tokens, t.choice) for t in TRIALS[:3]}
        assert store.known(provenance(**change)) == {}


def test_finals_are_timed_again_by_every_sweep_unless_they_took_the_device_down(path):
    fault = replace(TRIALS[3], outcome=Failed(FailureKind.LAUNCH, "an illegal memory access"), verified=False)
    for trials, spared in (([TRIALS[3]], False), ([fault], True), ([TRIALS[3]], False)):
        fill(path, provenance(), trials)
        with Store(path) as store:
            assert ((Subject.LAYER, 16, PLAN) in store.known(provenance())) is spared


def test_the_latest_screening_of_a_choice_counts(path):
    wrong = replace(TRIALS[0], outcome=Failed(FailureKind.WRONG, "relative error 0.3"))
    fill(path, provenance(), [*TRIALS, wrong])
    with Store(path) as store:
        assert store.known(provenance())[Subject.GATE_UP, 16, CONFIG] == wrong
        assert next(row.trial for row in latest(store.rows(SHAPE))) == wrong
        assert store.trials(provenance())[0] == wrong


def replay(path, trials, count):
    """Begin a replay in a connection of its own and record the first ``count`` trials; return what goes on with it."""
    store = Store(path)
    run = store.begin_replay(provenance(backend="replay"), "moetune sweep")
    for trial in trials[:count]:
        run.record(trial)
    return store, run


def test_replays_of_one_recording_do_not_pile_up_and_cost_no_measured_trial(path):
    fill(path, provenance())
    for _ in range(3):
        store, run = replay(path, TRIALS, len(TRIALS))
        run.record_bound(16, 99.0)
        store.close()
    with Store(path) as store:
        assert [row.trial for row in store.rows(SHAPE, backend="replay")] == list(TRIALS)
        assert [row.trial for row in store.rows(SHAPE)] == list(TRIALS)
        assert [run.backend for run in store.runs()] == ["cuda", "replay"]
        assert store.bounds(provenance(backend="replay")) == {16: 99.0}


def test_of_two_replays_at_once_the_store_holds_the_one_that_began_last_as_a_whole(path):
    first, first_run = replay(path, TRIALS, 2)
    second, second_run = replay(path, TRIALS, 1)
    for trial in TRIALS[2:]:
        first_run.record(trial)
    first_run.record_bound(16, 1.0)
    first_run.end()
    for trial in TRIALS[1:]:
        second_run.record(trial)
    first.close()
    second.close()
    with Store(path) as store:
        assert [(row.run, row.trial) for row in store.rows(SHAPE, backend="replay")] == [
            (second_run.id, trial) for trial in TRIALS
        ]
        assert [run.run for run in store.runs()] == [second_run.id]
        assert store.bounds(provenance(backend="replay")) == {}


def test_every_row_is_safe_the_moment_it_is_written(path):
    with Store(path) as store:
        store.begin(provenance(), "moetune sweep").record(TRIALS[0])
        # another connection sees it at once, so a kill after this line loses nothing
        assert sqlite3.connect(path).execute("SELECT count(*) FROM trials").fetchone() == (1,)


@pytest.mark.parametrize(
    "content", [b"not a database at all, but long enough to be one" * 40, b"SQLite format 3\0" + b"\xff" * 4080]
)
def test_a_damaged_store_is_one_sentence_with_the_fix(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"trial store .* is damaged .*move it away.*--store"):
        Store(path)
    assert path.read_bytes() == content


def test_a_store_with_a_damaged_row_names_the_row(path):
    fill(path, provenance())
    connection = sqlite3.connect(path)
    connection.execute("UPDATE trials SET outcome = '{\"median_us\": NaN}' WHERE id = 1")
    connection.commit()
    with Store(path) as store, pytest.raises(StoreError, match="trial 1"):
        store.known(provenance())


def test_a_store_cut_off_in_the_middle_is_one_sentence(path):
    fill(path, provenance(), TRIALS * 200)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(StoreError, match="damaged"), Store(path) as store:
        store.known(provenance())


def test_the_database_of_something_else_is_left_alone(path):
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.commit()
    for opened in (Store, Store.to_read):
        with pytest.raises(StoreError, match="is no trial store of moetune; name another"):
            opened(path)
    assert [row[0] for row in connection.execute("SELECT name FROM sqlite_master")] == ["recipes"]


def test_the_store_of_a_newer_moetune_is_refused(path):
    fill(path, provenance())
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    connection.close()
    for opened in (Store, Store.to_read):
        with pytest.raises(StoreError, match=rf"newer moetune \(schema {SCHEMA_VERSION + 1}"):
            opened(path)


@pytest.mark.parametrize("version", [-3, 0, 1])
def test_tables_that_only_share_a_name_with_ours_are_somebody_elses(path, version):
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE runs (distance TEXT)")
    connection.execute(f"PRAGMA user_version={version}")
    connection.commit()
    connection.close()
    for opened in (Store, Store.to_read):
        with pytest.raises(StoreError, match="is no trial store of moetune"), opened(path) as store:
            store.rows(SHAPE)


def test_a_store_that_is_only_read_stays_as_it_is(path):
    fill(path, provenance())
    before = path.read_bytes(), sorted(path.parent.iterdir())
    with Store.to_read(path) as store:
        assert [row.trial for row in store.rows(SHAPE)] == list(TRIALS)
        with pytest.raises(StoreError, match="readonly"):
            store.begin(provenance(), "moetune sweep")
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == before


def test_a_store_that_a_sweep_writes_is_read_with_its_latest_trial(path):
    with Store(path) as writing:
        run = writing.begin(provenance(), "moetune sweep")
        for trial in TRIALS:
            run.record(trial)
        with Store.to_read(path) as store:
            assert [row.trial for row in store.rows(SHAPE)] == list(TRIALS)


def test_reading_makes_no_store(path):
    with pytest.raises(StoreError, match="cannot use the trial store"):
        Store.to_read(path)
    assert not path.exists()


def test_a_store_may_be_called_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(Path(":memory:"), provenance())
    with Store.to_read(tmp_path / ":memory:") as store:
        assert len(store.runs()) == 1


def test_a_folder_in_place_of_the_store_is_one_sentence(path):
    path.mkdir(parents=True)
    with pytest.raises(StoreError, match=r"cannot use the trial store .*--store"):
        Store(path)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot make the folder"):
        Store(tmp_path / "file" / "trials.sqlite")


WRITER = """
import sys
from pathlib import Path
from test_store import TRIALS, fill, provenance
fill(Path(sys.argv[1]), provenance(), TRIALS * 50)
"""


def test_sweeps_that_start_at_the_same_moment_share_one_store(path, monkeypatch):
    paths = [str(Path(__file__).parent), *sys.path]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in paths if entry))
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stderr=subprocess.PIPE, env=environment)
        for _ in range(3)
    ]
    said = [writer.communicate(timeout=120)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0], said
    with Store(path) as store:
        assert len(store.runs()) == 3
        assert len(store.rows(SHAPE)) == 3 * 50 * len(TRIALS)


def test_the_default_store_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_store_path() == tmp_path / "moetune" / "trials.sqlite"
    monkeypatch.setenv("MOETUNE_STORE", str(tmp_path / "mine.db"))
    assert default_store_path() == tmp_path / "mine.db"


def test_trials_and_bounds_of_another_routing_are_never_mixed(path):
    uniform, zipf = provenance(), provenance(routing="zipf:1.1")
    fill(path, uniform, TRIALS[:1])
    with Store(path) as store:
        assert store.known(zipf) == {}
        assert store.trials(zipf) == []
        run = store.begin(zipf, "moetune sweep --routing zipf")
        run.record(TRIALS[3])
        run.record_bound(16, 55.0)
        assert store.trials(uniform) == [TRIALS[0]]
        assert store.trials(zipf) == [TRIALS[3]]
        assert (store.bounds(uniform), store.bounds(zipf)) == ({16: 100.5}, {16: 55.0})
        assert [row.routing for row in store.rows(SHAPE)] == ["uniform", "zipf:1.1"]


def test_uniform_provenance_is_spelled_as_before_there_was_another_routing():
    assert "routing" not in provenance().to_json()
    assert Provenance.from_json(provenance().to_json()) == provenance()
    zipf = provenance(routing="zipf:1.1")
    assert Provenance.from_json(zipf.to_json()) == zipf
    assert zipf.key != provenance().key


@pytest.mark.parametrize("routing", [5, None, ["uniform"], "x" * 3000])
def test_a_routing_that_is_no_text_is_refused(routing):
    with pytest.raises(ValueError, match="routing must be a text"):
        Provenance.from_json(provenance().to_json() | {"routing": routing})
