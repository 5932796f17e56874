"""``moetune strategies``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moetune.cli import main
from tests.cli.conftest import SHAPE, TOKENS, ship


@pytest.fixture
def recording(tmp_path):
    ship(tmp_path, SHAPE)
    return tmp_path / f"{SHAPE.key}.jsonl.xz"


def run(capsys, *arguments):
    code = main.run(["strategies", *map(str, arguments)])
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return code, printed


def test_the_list_names_the_default_and_says_what_each_does(capsys):
    code, printed = run(capsys, "list")
    assert code == 0
    assert [line.split()[0] for line in printed.out.splitlines()] == ["guided", "exhaustive", "random"]
    assert "the default" in printed.out.splitlines()[0]


def test_a_comparison_is_printed_written_and_the_same_each_time(capsys, recording, tmp_path):
    written = []
    for name in ("first.json", "second.json"):
        code, printed = run(
            capsys, "compare", recording, "--seeds", 3, "--strategies", "exhaustive,guided", "--json", tmp_path / name
        )
        assert code == 0, printed.err
        written.append((tmp_path / name).read_text("utf-8"))
    assert written[0] == written[1]
    value = json.loads(written[0])
    exhaustive, guided = value["scores"]
    assert (exhaustive["strategy"], guided["strategy"]) == ("exhaustive", "guided")
    assert exhaustive["share"] == 1.0
    assert exhaustive["regret"] == {"geomean": 0.0, "worst": 0.0}  # the configs lie 15% apart, far beyond the noise
    assert set(exhaustive["by_tokens"]) == {str(tokens) for tokens in TOKENS}
    assert "guided" in printed.out
    assert "regret is against the best recorded" in printed.err


def test_only_the_counts_asked_for_are_judged(capsys, recording, tmp_path):
    target = tmp_path / "scores.json"
    code, _ = run(capsys, "compare", recording, "--seeds", 1, "--tokens", "16", "--json", target)
    assert code == 0
    assert set(json.loads(target.read_text("utf-8"))["scores"][0]["by_tokens"]) == {"16"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("--seeds", "0"), "--seeds must be from 1 to 1000, got 0", id="no-seed"),
        pytest.param(("--strategies", "best"), "--strategies takes guided, exhaustive, random", id="unknown-strategy"),
        pytest.param(("--tokens", "17"), "--tokens 17 was not recorded; give some of 1,16,256", id="unrecorded"),
        pytest.param(("--tokens", "x"), "--tokens takes whole numbers", id="no-number"),
        pytest.param(("--json", "/"), "--json / is a folder; give a file", id="folder"),
    ],
)
def test_bad_usage_is_one_sentence_and_code_2(capsys, recording, arguments, said):
    code, printed = run(capsys, "compare", recording, *arguments)
    assert code == 2
    assert said in printed.err
    assert printed.out == ""


def test_a_file_that_is_missing_or_no_recording_is_refused(capsys, tmp_path):
    assert run(capsys, "compare", tmp_path / "none.jsonl.xz")[0] == 2
    bad = Path(tmp_path / "bad.jsonl.xz")
    bad.write_bytes(b"not xz")
    code, printed = run(capsys, "compare", bad)
    assert code != 0
    assert "is no usable recording" in printed.err


def test_without_a_command_the_help_is_printed(capsys):
    code, printed = run(capsys)
    assert code == 2
    assert "compare" in printed.out
