"""The options that limit a sweep: what they take, what they say, and what they do to a replay and to ``--target``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from moetune.cli import main
from moetune.cli.limit_options import parse_bytes, parse_limits, parse_structures
from moetune.errors import RunError, UsageError
from moetune_kernels.config import Role, Structure


@pytest.fixture
def asked(monkeypatch):
    requests = []

    def note(request, on_event, ahead):
        requests.append(request)
        raise RunError("noted")

    monkeypatch.setattr("moetune.tuning.sweep", note)
    return requests


@pytest.mark.parametrize("text", ["98304", "96KiB", "96KB", "96kb", "96 KiB", "96k", "98304B", " 98304 b "])
def test_sizes_are_bytes_and_k_is_1024(text):
    assert parse_bytes(text, "--max-smem") == 98_304


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "96MB", "96ib", "9.6e4", "1e5", "0x100", "९६", "96_000", "2000KB", "9" * 5000, "NaN", "96 K B"],
    ids=lambda text: text[:8],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match=r"--max-smem (takes bytes, e\.g\. 98304|must be from 1 to 1,048,576 bytes)"):
        parse_bytes(text, "--max-smem")


def test_structures_are_a_list():
    assert parse_structures("tma , gather,tma") == (Structure.GATHER, Structure.TMA)
    for text in ("", "gather,", "tma-permute", "GATHER", "x" * 1000):
        with pytest.raises(UsageError, match="--structures takes gather, tma, tma_permute"):
            parse_structures(text)


@pytest.mark.parametrize("registers", [0, -1, 23, 256, 1 << 70])
def test_registers_are_those_that_a_config_may_name(registers):
    with pytest.raises(UsageError, match="--max-registers must be from 24 to 255"):
        parse_limits(max_registers=registers)


def test_every_limit_reaches_the_tuner_and_the_recorded_command(asked, monkeypatch, tmp_path):
    (tmp_path / "space.json").write_text('{"down": {"num_warps": [4]}}')
    options = ["sweep", "--max-smem", "96KiB", "--max-registers", "128", "--structures", "gather,tma"]
    options += ["--space", str(tmp_path / "space.json"), "--out", str(tmp_path / "tables")]
    monkeypatch.setattr(sys, "argv", ["moetune", *options])
    assert main.run(options) == 1
    (request,) = asked
    limits = request.limits
    assert (limits.max_smem, limits.max_registers) == (98_304, 128)
    assert limits.structures == (Structure.GATHER, Structure.TMA)
    assert set(limits.file.allowed) == {Role.DOWN}
    assert request.command == " ".join(["moetune", *options[:-2]])
    assert not parse_limits().any


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-smem", "lots"], "--max-smem takes bytes, e.g. 98304, 96KiB or 96KB (K is 1,024); got 'lots'"),
        (["--max-registers", "300"], "--max-registers must be from 24 to 255, got 300"),
        (["--max-registers", "many"], "'many'"),
        (
            ["--structures", "gather,wgmma"],
            "--structures takes gather, tma, tma_permute, with commas between; got 'wgmma'",
        ),
        (["--space", "nowhere.json"], "--space nowhere.json cannot be read (No such file or directory)"),
        (
            ["--space", "bad.json"],
            "--space bad.json: down.block_m[1]: block_m must be one of 16, 32, 64, 128, 256, got 48",
        ),
        (["--space", "."], "--space . is not a file"),
        (["--space", ""], "the path is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_limits_are_one_sentence_and_never_reach_the_tuner(asked, capsys, monkeypatch, tmp_path, options, said):
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('{"down": {"block_m": [16, 48]}}')
    assert main.run(["sweep", *options]) == 2
    printed = capsys.readouterr()
    assert asked == []
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_a_replay_under_structures_gather_writes_plans_that_are_all_gather(monkeypatch, tmp_path, capsys):
    """On a recording that ships: free, the same token counts have plans of other structures too."""
    monkeypatch.setattr("moetune.tuning._gpu_is_there", lambda: False)
    monkeypatch.chdir(tmp_path)
    found = {}
    for options in ([], ["--structures", "gather"]):
        assert main.run(["sweep", "--model", "qwen3-30b-a3b", "--tokens", "1,16,64", *options]) == 0
        table = json.loads(Path(capsys.readouterr().out.splitlines()[-1].removeprefix("table: ")).read_text())
        plans = [entry["plan"] for entry in table["entries"].values()]
        found[len(options)] = Counter(plan[role.value]["structure"] for plan in plans for role in Role)
    assert set(found[0]) > {"gather"}
    assert found[2] == {"gather": 6}


def test_what_the_limits_removed_is_printed_per_gemm(recorded, capsys):
    Path("space.json").write_text('{"block_n": [64]}')
    assert main.run(["sweep", *recorded, "--tokens", "1,16", "--space", "space.json"]) == 0
    lines = capsys.readouterr().err.splitlines()
    for role in Role:
        place = next(place for place, line in enumerate(lines) if line.startswith(f"{role.value}: "))
        assert "that can run inside the limits" in lines[place]
        assert lines[place + 1].startswith("  limits: ")
        assert lines[place + 1].endswith(" outside --space space.json")
    assert any("compiled candidates are inside the limits" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--structures", "tma_permute"], "no config is left for gate_up: outside --structures tma_permute: "),
        (["--max-smem", "1KB"], "no compiled kernel is left for gate_up and down: gate_up: over --max-smem 1024: "),
        (["--max-registers", "32"], "over --max-registers 32: "),
        (["--space", "tall.json"], "outside --space tall.json: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_limits_that_leave_nothing_exit_with_2_and_say_what_removed_how_many(recorded, capsys, options, said):
    Path("tall.json").write_text('{"block_m": [256]}')
    assert main.run(["sweep", *recorded, "--tokens", "1,16", *options]) == 2
    printed = capsys.readouterr()
    (error,) = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert said in error
    assert "removed" in error
    assert error.endswith(("widen the limits", "out of --tokens"))
    assert printed.out == ""


def test_a_target_compiles_inside_the_limits(quick_compiler, no_gpu, capsys):
    layer = ["sweep", "--model", "qwen3-30b-a3b", "--tokens", "16,4096", "--target", "sm_90"]
    assert main.run([*layer, "--structures", "gather"]) == 0
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()[1:]]
    assert len(rows) >= 40
    assert {row[1] for row in rows} == {"gather"}
    assert "outside --structures gather: " in printed.err
    assert main.run([*layer, "--max-registers", "60"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert rows
    assert all(row.endswith("over --max-registers 60") for row in rows)  # the made-up compiler says 64
    assert main.run([*layer, "--structures", "tma_permute"]) == 2
    assert "no config is left for down" in capsys.readouterr().err
