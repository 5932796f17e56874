"""Whole sweeps through the composition root, on a fake GPU and on its recording."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moetune import tuning
from moetune.engine import events
from moetune.engine.budget import Budget
from moetune.errors import MissingError, UsageError
from moetune.outcome import Measured, Stage, Subject
from moetune.store import Store, load_recording, recording, save_recording
from moetune.tuning import Bed, SweepRequest, replay_bed, run_on
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.paths import shipped_tables_dir, user_tables_dir
from moetune_kernels.shape import MoEShape
from moetune_kernels.table import TunedTable

TOKENS = (1, 8, 64, 512, 4096)
SHAPE = MoEShape(hidden=1024, inter=512, local_experts=8, top_k=2)


def provenance_of(backend):
    from moetune.store import Provenance

    return Provenance(
        backend=backend.name,
        shape=backend.shape,
        device=backend.device,
        kernels_sha256="0" * 64,
        triton="3.6.0",
        torch="2.11.0",
        driver="580.1",
    )


def bed_of(backend, folder):
    return Bed(
        backend, provenance_of(backend), "2026-12-01T08:00:00+00:00", folder / "tables", folder / "trials.sqlite"
    )


def sweep_on(backend, folder, on_event=lambda _: None, **changes):
    request = replace(SweepRequest(shape=SHAPE, tokens=TOKENS, budget_s=30.0), **changes)
    return run_on(bed_of(backend, folder), request, Budget(None), on_event)


def screenings(folder, backend):
    with Store(folder / "trials.sqlite") as store:
        return [row.trial for row in store.rows(SHAPE, backend.device) if row.trial.stage is Stage.SCREEN]


def plans_of(table):
    return {tokens: entry.plan for tokens, entry in table.entries.items()}


def test_a_sweep_leaves_a_table_that_parses_and_a_store_with_every_trial(fake_backend, tmp_path):
    seen = []
    result = sweep_on(fake_backend(), tmp_path, seen.append)
    assert result.table_path == tmp_path / "tables" / "nvidia_h200" / "e8_h1024_i512_k2_bf16.json"
    table = TunedTable.parse(result.table_path.read_bytes(), "the table")
    assert table == result.table
    assert (tuple(table.entries), table.faults, table.backend) == (TOKENS, (), "cuda")
    with Store(result.store_path) as store:
        assert len(store.rows(SHAPE)) == result.trials == sum(isinstance(event, events.TrialEnded) for event in seen)
    started = seen[0]
    assert isinstance(started, events.SweepStarted)
    assert started.resumed == 0
    assert not result.stopped_early


def test_the_same_command_continues_where_a_stopped_sweep_was(fake_backend, tmp_path):
    unbroken = sweep_on(fake_backend(), tmp_path / "unbroken")

    def stop(tokens):
        if tokens == 64 and first.opened.count(64) == 2:  # surveyed before
            raise KeyboardInterrupt

    first = fake_backend(open=stop)
    with pytest.raises(KeyboardInterrupt):
        sweep_on(first, tmp_path)
    written = TunedTable.parse(next((tmp_path / "tables").rglob("*.json")).read_bytes(), "the interim table")
    assert set(written.entries) == {1, 8}
    seen, second = [], fake_backend()
    result = sweep_on(second, tmp_path, seen.append)
    assert seen[0].resumed > 0
    assert first.calls["first_launch", 1] > 0 < first.calls["first_launch", 8]
    assert not set(first.launched) & set(second.launched)
    assert second.calls["first_launch", 64] > 0
    assert plans_of(result.table) == plans_of(unbroken.table)
    third = fake_backend()
    sweep_on(third, tmp_path)
    assert not set(third.launched) & {*first.launched, *second.launched}
    assert len(third.launched) < 0.15 * len(first.launched + second.launched)  # times are rounded where they are kept
    assert third.calls["routing"] == 0
    assert third.calls["time_layers"] >= 2 * len(TOKENS)  # finals and the default are timed in the run that writes


def test_a_sweep_of_few_token_counts_keeps_the_entries_of_the_others(fake_backend, tmp_path):
    whole = sweep_on(fake_backend(), tmp_path)
    result = sweep_on(fake_backend(), tmp_path, tokens=(8, 16))
    read = TunedTable.parse(result.table_path.read_bytes(), "the table")
    assert tuple(read.entries) == (1, 8, 16, 64, 512, 4096)
    assert read.entries[4096].median_us == whole.table.entries[4096].median_us
    assert [entry.serves for entry in read.entries.values()][1:4] == [(3, 11), (12, 32), (33, 181)]
    assert (result.kept, whole.kept) == ((1, 64, 512, 4096), ())


def test_a_sweep_that_is_stopped_early_leaves_what_an_earlier_one_measured(fake_backend, tmp_path):
    whole = sweep_on(fake_backend(), tmp_path)

    def stop(tokens):
        if tokens == 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep_on(fake_backend(open=stop), tmp_path, fresh=True)
    assert set(TunedTable.parse(whole.table_path.read_bytes(), "the table").entries) == set(TOKENS)


@pytest.mark.parametrize(
    "changed", [{"triton": "3.7.0"}, {"driver": "590.1"}, {"kernels_sha256": "1" * 64}], ids=lambda one: next(iter(one))
)
def test_entries_of_other_kernels_or_versions_are_not_kept(fake_backend, tmp_path, changed):
    sweep_on(fake_backend(), tmp_path)
    backend = fake_backend()
    bed = replace(bed_of(backend, tmp_path), provenance=replace(provenance_of(backend), **changed))
    result = run_on(bed, SweepRequest(shape=SHAPE, tokens=(8,)), Budget(None), lambda _: None)
    assert tuple(result.table.entries) == (8,)


def test_a_token_count_that_fails_now_is_not_kept(fake_backend, tmp_path):
    from moetune.outcome import Failed, FailureKind

    sweep_on(fake_backend(), tmp_path)
    backend = fake_backend(open=lambda tokens: Failed(FailureKind.RESOURCES, "no room") if tokens == 64 else None)
    result = sweep_on(backend, tmp_path, tokens=(8, 64))
    assert tuple(result.table.entries) == (1, 8, 512, 4096)


def test_fresh_measures_everything_again(fake_backend, tmp_path):
    sweep_on(fake_backend(), tmp_path)
    again = fake_backend()
    sweep_on(again, tmp_path, fresh=True)
    assert again.calls["first_launch"] > 0


KILLED = """
import os, signal, sys
from pathlib import Path
from conftest import FakeBackend
from test_tuning import sweep_on
from moetune.engine.events import TokenDone

done = []
def on_event(event):
    if isinstance(event, TokenDone):
        done.append(event)
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

sweep_on(FakeBackend(), Path(sys.argv[1]), on_event)
"""


def test_a_killed_sweep_leaves_its_finished_token_counts_and_loses_no_trial(fake_backend, tmp_path):
    paths = os.pathsep.join([str(Path(__file__).parent), *(entry for entry in sys.path if entry)])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env=dict(os.environ, PYTHONPATH=paths),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    table = TunedTable.parse(next((tmp_path / "tables").rglob("*.json")).read_bytes(), "the interim table")
    assert len(table.entries) == 3
    backend = fake_backend()
    kept = screenings(tmp_path, backend)
    assert {trial.tokens for trial in kept if trial.subject is Subject.DOWN} >= {1, 8, 64}
    seen = []
    result = sweep_on(backend, tmp_path, seen.append)
    assert seen[0].resumed == len({(trial.subject, trial.tokens, trial.choice) for trial in kept})
    known = {(trial.subject.value, trial.choice, trial.tokens) for trial in kept}
    assert known
    assert not known & {(role.value, config, tokens) for role, config, tokens in backend.launched}
    assert tuple(result.table.entries) == TOKENS


def test_a_recording_replays_to_the_same_table_without_inventing_a_time(fake_backend, tmp_path):
    live = sweep_on(fake_backend(), tmp_path, record=tmp_path / "tiny.jsonl.xz")
    recorded = load_recording(tmp_path / "tiny.jsonl.xz")
    request = SweepRequest(shape=SHAPE, tokens=TOKENS, out_dir=tmp_path / "replay")
    results = [run_on(replay_bed(recorded, request), request, Budget(None), lambda _: None) for _ in range(2)]
    first, second = (result.table for result in results)
    assert first == second
    assert first.backend == results[0].backend == "replay"
    assert first.measured_at == recorded.measured_at
    assert plans_of(first) == plans_of(live.table)
    layer_us = {
        round(trial.outcome.median_us, 3)
        for trial in recorded.trials
        if trial.subject is Subject.LAYER and isinstance(trial.outcome, Measured)
    }
    assert {entry.median_us for entry in first.entries.values()} <= layer_us
    assert results[0].store_path == tmp_path / "replay" / "trials.sqlite"


def test_a_replay_of_some_token_counts_skips_those_that_were_not_recorded(fake_backend, tmp_path):
    sweep_on(fake_backend(), tmp_path, record=tmp_path / "tiny.jsonl.xz")
    recorded = load_recording(tmp_path / "tiny.jsonl.xz")
    request = SweepRequest(shape=SHAPE, tokens=(8, 9), out_dir=tmp_path / "replay")
    seen = []
    result = run_on(replay_bed(recorded, request), request, Budget(None), seen.append)
    assert tuple(result.table.entries) == (8,)
    assert [event.tokens for event in seen if isinstance(event, events.TokenFailed)] == [9]
    with pytest.raises(MissingError, match="use --tokens 1,8,64,512,4096"):
        replay_bed(recorded, replace(request, tokens=(9,)))


@pytest.fixture
def without_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "_gpu_is_there", lambda: False)
    monkeypatch.setattr(recording, "SHIPPED_DIRECTORY", tmp_path / "shipped")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "shipped"


def test_without_a_gpu_a_shipped_recording_is_replayed_into_its_own_folder(without_gpu, fake_backend, tmp_path):
    live = sweep_on(fake_backend(), tmp_path / "live", record=tmp_path / "tiny.jsonl.xz")
    save_recording(load_recording(tmp_path / "tiny.jsonl.xz"), without_gpu / f"{SHAPE.key}.jsonl.xz")
    result = tuning.sweep(SweepRequest(shape=SHAPE, tokens=TOKENS))
    assert result.backend == "replay"
    assert result.table_path.parts[0] == "moetune-replay"
    assert plans_of(result.table) == plans_of(live.table)
    assert json.loads(result.table_path.read_text())["backend"] == "replay"


def test_without_a_gpu_or_a_recording_the_ways_forward_are_named(without_gpu):
    with pytest.raises(MissingError, match=r"no CUDA GPU here.*e8_h1024_i512_k2_bf16.*--target sm_90"):
        tuning.sweep(SweepRequest(shape=SHAPE, tokens=TOKENS))


def test_a_replay_is_not_recorded_again(without_gpu, tmp_path):
    with pytest.raises(MissingError, match="nothing new to record"):
        tuning.sweep(SweepRequest(shape=SHAPE, tokens=TOKENS, record=tmp_path / "again.jsonl.xz"))


@pytest.mark.parametrize("folder", [shipped_tables_dir, user_tables_dir], ids=["shipped", "user"])
def test_replayed_tables_never_go_where_real_ones_are_looked_for(without_gpu, fake_backend, tmp_path, folder):
    sweep_on(fake_backend(), tmp_path / "live", record=without_gpu / f"{SHAPE.key}.jsonl.xz")
    with pytest.raises(UsageError, match="replayed tables do not go"):
        tuning.sweep(SweepRequest(shape=SHAPE, tokens=TOKENS, out_dir=folder()))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"tokens": ()}, "token counts must be", id="no-tokens"),
        pytest.param({"tokens": (0, 4)}, "token counts must be", id="zero-tokens"),
        pytest.param({"tokens": (1 << 30,)}, "token counts must be", id="too-many-tokens"),
        pytest.param({"record": Path("trials.json")}, r"ends in \.jsonl\.xz", id="recording-of-another-kind"),
        pytest.param({"strategy": "annealing"}, "strategy must be one of", id="unknown-strategy"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_before_anything_runs(changes, said):
    with pytest.raises(UsageError, match=said):
        tuning.sweep(replace(SweepRequest(shape=SHAPE, tokens=TOKENS), **changes))


def test_trials_of_changed_kernels_are_measured_again(fake_backend, tmp_path):
    sweep_on(fake_backend(), tmp_path)
    again = fake_backend()
    bed = bed_of(again, tmp_path)
    bed = replace(bed, provenance=replace(bed.provenance, kernels_sha256="f" * 64))
    run_on(bed, SweepRequest(shape=SHAPE, tokens=TOKENS, budget_s=30.0), Budget(None), lambda _: None)
    assert again.calls["first_launch"] > 0


@pytest.mark.parametrize("key", recording.shipped_shapes())
def test_a_shipped_recording_replays_to_plans_that_were_timed_as_layers(key, tmp_path):
    """A sum of kernels never stands before a layer that was measured."""
    found = next(path for path in recording.SHIPPED_DIRECTORY.iterdir() if path.name.startswith(key))
    recorded = load_recording(found)
    backend = replay_bed(recorded, SweepRequest(shape=recorded.provenance.shape, tokens=(1,))).backend
    tokens = tuple(sorted(recorded.bounds))
    request = SweepRequest(shape=backend.shape, tokens=tokens, budget_s=60.0, out_dir=tmp_path)
    results = [run_on(replay_bed(recorded, request), request, Budget(60.0), lambda _: None) for _ in range(2)]
    assert results[0].table == results[1].table
    assert not results[0].stopped_early  # nothing is waited for, so no budget ends it
    assert tuple(results[0].table.entries) == tokens
    for count, entry in results[0].table.entries.items():
        default = heuristic_plan(backend.shape, count, backend.device)
        known = {without_smem(plan).text for plan in [*backend.recorded_plans(count), default]}
        assert without_smem(entry.plan).text in known


def without_smem(plan):
    return replace(plan, gate_up=replace(plan.gate_up, smem_size=None), down=replace(plan.down, smem_size=None))
