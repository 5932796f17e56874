"""Values of options: what is refused, with which sentence, before any work starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moetune.cli import main, options
from moetune.cli.options import SWEEP_TOKENS, output_dir, output_file, parse_budget, parse_target, parse_tokens
from moetune.errors import UsageError


def test_the_default_ladder_is_the_documented_one():
    ladder = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    assert parse_tokens(SWEEP_TOKENS) == ladder


def test_duplicate_token_counts_are_dropped_and_sorted():
    assert parse_tokens("64, 1,64,16") == (1, 16, 64)


@pytest.mark.parametrize(
    "text", ["0", "-4", "131073", "1,,2", "", "abc", "1.5", "1e3", "1_000", "٣", "9" * 5000, "1,0", "--5", "-"]
)
def test_a_token_list_that_makes_no_sense_is_refused_in_one_short_sentence(text):
    with pytest.raises(UsageError, match="--tokens") as caught:
        parse_tokens(text)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize("command", ["sweep", "profile"])
@pytest.mark.parametrize("tokens", ["0", "-1", "131073", "many"])
def test_bad_token_counts_exit_with_2(capsys, command, tokens):
    assert main.run([command, f"--tokens={tokens}"]) == 2
    assert "--tokens" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_budget_that_is_no_time_is_refused(seconds):
    with pytest.raises(UsageError, match="--budget must be a positive number"):
        parse_budget(seconds)
    assert parse_budget(None) is None


def test_an_unknown_target_names_the_known_ones():
    with pytest.raises(UsageError, match=r"sm_80.*gfx942, got 'sm_70'"):
        parse_target("sm_70")


def test_a_file_where_a_folder_is_wanted_is_refused_before_the_work(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(UsageError, match="is a file; give a folder"):
            output_dir(path)
    with pytest.raises(UsageError, match="is a folder; give a file"):
        output_file(tmp_path, "--store")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused_before_the_work(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="no permission"):
        output_dir(tmp_path / "new")


def test_a_folder_that_is_not_there_yet_is_fine(tmp_path):
    assert output_dir(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "arguments",
    ["sweep --out", "sweep --store", "sweep --config", "report --out", "report", "check", "profile --json"],
)
def test_an_empty_path_is_a_forgotten_name_and_never_the_current_folder(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.run([*arguments.split(), ""]) == 2
    assert "the path is empty; give a name" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["sweep", "--out"], ["sweep", "--store"], ["report"], ["check"]], ids=" ".join)
@pytest.mark.parametrize("name", ["loop", "n" * 300])
def test_a_path_that_leads_nowhere_is_bad_input(arguments, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert main.run([*arguments, name]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def test_the_home_folder_in_a_variable_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert options.given_path("~/trials.sqlite") == tmp_path / "trials.sqlite"
    assert options.given_path("a/~/b") == Path("a/~/b")


def test_the_command_of_a_table_is_text_whatever_bytes_a_path_has(monkeypatch):
    monkeypatch.setattr("sys.argv", ["moetune", "sweep", "--out", "h\udcc3\udcbc\udcff"])
    assert options.command_line() == "moetune sweep --out 'h\u00fc\\xff'"


def test_a_command_for_others_names_none_of_its_makers_paths(monkeypatch):
    typed = ["x", "sweep", "--model", "a", "--out", "/home/me", "--store=/tmp/s", "--budget", "9", "--record", "r.xz"]
    monkeypatch.setattr("sys.argv", typed)
    assert options.command_line(leave_out=options.LOCAL_OPTIONS) == "moetune sweep --model a --budget 9"
