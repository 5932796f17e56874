"""Kills of real processes that sweep a fake GPU, and what the judge sees in stores that are not as they must be."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import kill_sweep
import pytest
from command import Stopwatch
from kill_sweep import Killer, judged, main, repeated, unsound
from processes import GPU, Process
from sweeps import Place, Sweep

from moetune.errors import RunError, UsageError
from moetune.outcome import Failed, FailureKind
from moetune.store import Store
from tests.benchmarks.conftest import LIVE
from tests.benchmarks.test_stored import CONFIGS, screening
from tests.engine.conftest import measured

TIMED = screening(CONFIGS[0])
VERIFIED = screening(CONFIGS[0], verified=True)
LONGER = screening(CONFIGS[0], outcome=measured(5.0, samples=9))
SLOW = screening(CONFIGS[0], outcome=Failed(FailureKind.SLOW, "hopeless"))
WRONG = screening(CONFIGS[0], outcome=Failed(FailureKind.WRONG, "off"))


def live(place, options):
    return Sweep(place, options, LIVE)


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setenv("FAKE_SLOW", "0.01")


@pytest.fixture
def ended(tmp_path):
    """Return the place of a sweep of the fake GPU that came to its end."""
    place = Place(tmp_path / "ended", tmp_path / "triton")
    with live(place, []) as sweep:
        assert sweep.wait(120.0).failure is None
    return place


@pytest.mark.timeout(300)
def test_every_kill_is_a_real_one_and_every_sweep_is_resumed(gpu_here, slow, tmp_path, capsys):
    assert main([str(tmp_path / "out.json"), "--kills", "3"], start=live) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["moments"]) == 3
    assert found["moments"] == sorted(found["moments"])  # one in each third of the undisturbed time
    assert max(found["kept"]) > 0
    assert found["resumed"] >= 1
    assert found["faults"] == []
    assert capsys.readouterr().out.count("\nkilled after") == 3


@pytest.mark.timeout(300)
def test_a_sweep_that_measures_again_what_the_store_knows_is_seen(slow, tmp_path, monkeypatch):
    killer = Killer(tmp_path, [], live, Stopwatch(300.0))
    monkeypatch.setenv("FAKE_FORGETS", "1")
    late = type("Late", (), {"random": lambda self: 0.9})()  # so that there is something to forget
    found = killer.run(1, late)
    assert len(found.moments) == 1
    assert found.kept[0] > 0
    assert any("gained nothing" in fault for fault in found.faults)


def test_a_failed_sweep_is_said_in_its_own_words(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_FAILS", "1")
    with pytest.raises(RunError, match="the GPU gives no more answers"):
        Killer(tmp_path, [], live, Stopwatch(60.0)).run(1, random.Random(0))


def test_too_little_time_for_all_kills_is_a_fault(tmp_path):
    clock = SimpleNamespace(left_s=60.0)
    killer = Killer(tmp_path, [], live, clock)
    undisturbed = killer._to_the_end

    def to_the_end(place):
        ended = undisturbed(place)
        clock.left_s = 0.1  # what the first sweep took is all that there was
        return ended

    killer._to_the_end = to_the_end
    found = killer.run(2, random.Random(0))
    assert (found.moments, found.faults) == ([], ["there was time for 0 of 2 kills only"])


def test_a_process_that_outlives_its_sweep_is_a_fault(slow, tmp_path, monkeypatch):
    monkeypatch.setattr(kill_sweep, "left_behind", lambda family, limit_s: [Process(17, 10, 1, GPU)])
    found = kill_sweep.Kills(undisturbed_s=1.0)
    assert Killer(tmp_path, [], live, Stopwatch(60.0))._kill(Place(tmp_path / "1", tmp_path / "triton"), 0.1, found)
    assert found.faults == ["process 17 (gpu) outlives its sweep"]


def test_no_kills_at_all_is_bad_usage(gpu_here, tmp_path):
    with pytest.raises(UsageError, match="--kills must be at least 1"):
        main([str(tmp_path / "out.json"), "--kills", "0"])


@pytest.mark.parametrize(
    ("before", "after", "is_fault"),
    [
        (TIMED, TIMED, True),
        (VERIFIED, VERIFIED, True),
        (LONGER, TIMED, True),
        (WRONG, TIMED, True),
        (WRONG, WRONG, True),
        (TIMED, VERIFIED, False),
        (TIMED, LONGER, False),
        (TIMED, WRONG, False),
        (SLOW, TIMED, False),
        (TIMED, screening(CONFIGS[1]), False),
        (TIMED, screening(CONFIGS[0], tokens=16), False),
    ],
)
def test_a_screening_is_repeated_when_the_later_run_learned_nothing(live_store, before, after, is_fault):
    found = list(repeated(live_store([before], [after])))
    assert len(found) == is_fault


def test_screenings_of_one_run_may_follow_each_other(live_store):
    assert list(repeated(live_store([TIMED, TIMED, VERIFIED]))) == []


def test_a_sound_place_has_no_faults_and_a_lost_token_count_is_one(ended):
    assert list(judged(ended, [8, 512])) == []
    assert list(judged(ended, [8, 64, 512])) == ["the table of a resumed sweep lacks 64 tokens"]


def test_runs_that_could_not_use_each_other_s_trials_are_no_proof(ended, live_store, tmp_path):
    live_store([TIMED])
    place = Place(tmp_path, tmp_path / "triton")
    ended.tables.rename(place.tables)
    assert list(judged(place, [8])) == []
    live_store([TIMED], driver="590.1")
    assert any("none could use what another left" in fault for fault in judged(place, [8]))


def test_a_last_run_without_an_end_a_replay_and_half_files_are_faults(ended):
    with Store(ended.store) as store:
        store.begin(_replayed(store), "moetune sweep")
    (ended.table_path().parent / ".e8.json.x1.tmp").touch()
    found = list(judged(ended, [8]))
    assert "the last run is not marked as ended" in found
    assert "a sweep replayed recorded trials: nothing was measured" in found
    assert "left behind: .e8.json.x1.tmp" in found


def _replayed(store):
    from dataclasses import replace

    from tests.engine.conftest import FakeBackend
    from tests.engine.test_tuning import provenance_of

    return replace(provenance_of(FakeBackend()), backend="replay")


def test_a_damaged_store_and_a_cut_table_are_unsound(ended):
    assert list(unsound(ended)) == []
    table = ended.table_path()
    table.write_bytes(table.read_bytes()[:200])
    data = bytearray(ended.store.read_bytes())
    data[4096 * 3 : 4096 * 5] = b"\xff" * 8192
    ended.store.write_bytes(bytes(data))
    faults = list(unsound(ended))
    assert any("the store is damaged" in fault for fault in faults)
    assert any("table" in fault for fault in faults)
