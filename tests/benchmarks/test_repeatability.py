"""Pairs of sweeps: what is timed again, what is judged, and how a file of earlier pairs is gone on from."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from remeasure import Remeasured, remeasured
from repeatability import Pair, lines_of, main
from sweeps import Ended

from moetune.errors import RunError, UsageError
from moetune.outcome import Failed, FailureKind
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.shape import MoEShape
from tests.engine.conftest import FakeBackend, measured
from tests.engine.test_tuning import sweep_on

ROUNDS = 10
EQUAL = [
    Remeasured(tokens=1, a_us=10.0, b_us=10.1, default_us=12.0, same_plan=False),
    Remeasured(tokens=16, a_us=50.0, b_us=50.0, default_us=50.0, same_plan=True),
]
APART = [EQUAL[0], replace(EQUAL[1], b_us=51.5, same_plan=False)]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return the tables of two sweeps of a fake GPU, of which the second finds another plan at 512 tokens."""
    folder = tmp_path_factory.mktemp("tables")
    first = sweep_on(FakeBackend(), folder / "a", tokens=(8, 512)).table
    other = heuristic_plan(first.shape, 512, first.device)
    if other == first.entries[512].plan:
        other = replace(other, gate_up=replace(other.gate_up, group_m=other.gate_up.group_m + 1))
    entries = {**first.entries, 512: replace(first.entries[512], plan=other)}
    return first, replace(first, entries=entries)


@pytest.fixture
def paired(gpu_here, tmp_path):
    """Return a function that runs the benchmark where each sweep ends at once and ``rows`` are timed again."""
    swept = []

    def run(place, options, limit_s):
        swept.append((place, list(options)))
        return Ended(1.5, 0, "")

    def paired(*arguments, rows=EQUAL, run=run, out="out.json"):
        code = main([str(tmp_path / out), *arguments], run=run, time_again=lambda first, second, limit_s: rows)
        return code, json.loads((tmp_path / out).read_text())

    paired.swept = swept
    return paired


def test_both_plans_and_the_default_are_timed_in_the_same_rounds(tables):
    a, b = tables
    asked = []

    def layer(plan, rounds, tokens):
        asked.append((tokens, plan, rounds))
        return measured({0: 10.0, 1: 10.3, 2: 11.0}[(len(asked) - 1) % 3])

    rows = remeasured(FakeBackend(layer=layer), a, b, ROUNDS)
    assert asked == [
        (tokens, plan, ROUNDS)
        for tokens in (8, 512)
        for plan in (a.entries[tokens].plan, b.entries[tokens].plan, heuristic_plan(a.shape, tokens, a.device))
    ]
    assert rows == [
        Remeasured(tokens=tokens, a_us=10.0, b_us=10.3, default_us=11.0, same_plan=tokens == 8) for tokens in (8, 512)
    ]
    assert rows[0].differ == pytest.approx(0.03)
    assert replace(rows[0], a_us=10.3, b_us=10.0).differ == rows[0].differ


def test_a_plan_that_fails_when_it_is_timed_again_is_named(tables):
    wrong = Failed(FailureKind.WRONG, "its output is off")
    a, b = tables
    other = b.entries[512].plan
    backend = FakeBackend(layer=lambda plan, rounds, tokens: wrong if (tokens, plan) == (512, other) else None)
    with pytest.raises(RunError, match=r"512 tokens: the second table's plan failed .*: its output is off"):
        remeasured(backend, a, b, ROUNDS)
    with pytest.raises(RunError, match="8 tokens could not be opened"):
        remeasured(FakeBackend(open=lambda tokens: wrong), a, b, ROUNDS)


def test_tables_of_other_layers_or_counts_are_refused(tables):
    a, b = tables
    with pytest.raises(UsageError, match="same token counts"):
        remeasured(FakeBackend(), a, replace(b, entries={8: b.entries[8]}), ROUNDS)
    other = replace(b, shape=MoEShape(hidden=2048, inter=512, local_experts=8, top_k=2))
    with pytest.raises(UsageError, match="one layer"):
        remeasured(FakeBackend(), a, other, ROUNDS)


def test_each_sweep_has_a_store_of_its_own_and_all_one_cache(paired, capsys):
    code, results = paired("--pairs", "2", "--tokens", "1,16", "--", "--budget", "60")
    assert code == 0
    places = [place for place, _ in paired.swept]
    assert len({place.store for place in places}) == len({place.tables for place in places}) == 4
    assert len({place.cache for place in places}) == 1
    assert paired.swept[0][1] == ["--model", "qwen3-30b-a3b", "--tokens", "1,16", "--budget", "60"]
    assert results["pairs"] == [{"sweep_s": [1.5, 1.5], "rows": [asdict(row) for row in EQUAL]}] * 2
    said = capsys.readouterr().out
    assert "worst of all: 1.00% at 1 tokens in pair 1" in said
    assert "same plan in 2 of 4 choices" in said


def test_more_than_two_percent_apart_is_exit_code_1(paired, capsys):
    code, _ = paired("--pairs", "1", rows=APART)
    assert code == 1
    assert "worst of all: 3.00% at 16 tokens in pair 1" in capsys.readouterr().out
    assert "OVER THE GOAL" in lines_of(1, Pair(sweep_s=(1.0, 1.0), rows=APART))[-1]


def test_a_file_of_earlier_pairs_is_gone_on_from(paired, tmp_path):
    paired("--pairs", "1", rows=APART, out="first.json")
    before = len(paired.swept)
    code, results = paired("--pairs", "3", "--from", str(tmp_path / "first.json"))
    assert len(paired.swept) - before == 4
    assert code == 1  # the earlier pair's difference still counts
    assert [len(pair["rows"]) for pair in results["pairs"]] == [2, 2, 2]
    assert results["pairs"][0]["rows"][1]["b_us"] == 51.5


def test_a_pair_that_does_not_fit_is_not_begun_and_said(paired, capsys, monkeypatch):
    left = iter([100.0, 100.0, 100.0, 100.0, 100.0, 40.0, 40.0, 40.0])
    monkeypatch.setattr(
        "repeatability.Stopwatch", lambda limit_s: type("Clock", (), {"left_s": property(lambda _: next(left))})()
    )
    code, results = paired("--pairs", "5")
    assert code == 1
    assert len(results["pairs"]) == 1
    assert "1 of 5 pairs are done; go on with --from" in capsys.readouterr().out


def test_a_failed_sweep_keeps_the_pairs_before_it(paired, tmp_path):
    ends = iter([Ended(1.5, 0, ""), Ended(1.5, 0, ""), Ended(2.0, 1, "the GPU gives no more answers")])
    with pytest.raises(RunError, match="the GPU gives no more answers"):
        paired("--pairs", "2", run=lambda place, options, limit_s: next(ends))
    assert len(json.loads((tmp_path / "out.json").read_text())["pairs"]) == 1


ROW = asdict(EQUAL[0])
PAIR = {"sweep_s": [1.0, 1.0], "rows": [ROW]}
WHAT = {"model": "qwen3-30b-a3b", "tokens": [1, 16], "sweep_options": []}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        {"pairs": []},
        WHAT | {"pairs": {}},
        WHAT | {"model": "mixtral-8x7b", "pairs": []},
        WHAT | {"tokens": [1], "pairs": []},
        WHAT | {"pairs": [PAIR | {"sweep_s": [1.0]}]},
        WHAT | {"pairs": [PAIR | {"rows": []}]},
        WHAT | {"pairs": [PAIR | {"rows": [ROW | {"tokens": True}]}]},
        WHAT | {"pairs": [PAIR | {"rows": [ROW | {"a_us": 0.0}]}]},
        WHAT | {"pairs": [PAIR | {"rows": [ROW | {"b_us": float("nan")}]}]},
        WHAT | {"pairs": [PAIR | {"rows": [ROW | {"same_plan": 1}]}]},
        WHAT | {"pairs": [PAIR | {"rows": [ROW | {"more": 1}]}]},
    ],
    ids=str,
)
def test_a_file_that_is_not_of_the_same_sweep_is_refused(paired, tmp_path, content):
    path = tmp_path / "earlier.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UsageError, match="give a file that this benchmark wrote"):
        paired("--tokens", "1,16", "--from", str(path))
    assert paired.swept == []


def test_a_sound_file_of_the_same_sweep_is_taken(paired, tmp_path):
    (tmp_path / "earlier.json").write_text(json.dumps(WHAT | {"pairs": [PAIR]}))
    code, results = paired("--tokens", "1,16", "--pairs", "2", "--from", str(tmp_path / "earlier.json"))
    assert code == 0
    assert results["pairs"][0] == PAIR
