"""``moetune trials``: what stands on the screen, what is filtered, and every file that is no store."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.cli import main
from moetune.outcome import Failed, FailureKind, Subject
from moetune.store import Provenance, Store, default_store_path
from moetune.store.schema import SCHEMA_VERSION
from moetune_kernels.device import TARGETS
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.shape import MoEShape
from tests.cli.conftest import SHAPE, measured, ship, trials

QWEN = MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8)
TOKENS = (1, 16)
REASON = "its first launch took 700.0 us, over 2.5 times the best so far (12.0 us)"


def made_for(shape, **changes):
    fields = {"backend": "cuda", "kernels_sha256": "0" * 64, "triton": "3.6.0", "torch": "2.11.0", "driver": "580.1"}
    return Provenance(shape=shape, device=TARGETS["sm_90"], **(fields | changes))


def fill(path, shape=SHAPE, *, end=True, extra=(), **changes):
    """Write a run of all made-up trials at two token counts and one that was dropped; return how many."""
    every = [*(trial for tokens in TOKENS for trial in trials(shape, tokens)), *extra]
    dropped = next(trial for trial in every if trial.subject is Subject.DOWN)
    every.append(replace(dropped, outcome=Failed(FailureKind.SLOW, REASON), verified=False, compiled=None))
    with Store(path) as store:
        run = store.begin(made_for(shape, **changes), "moetune sweep", "GPU-1")
        for trial in every:
            run.record(trial)
        if end:
            run.end()
    return len(every)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Make a store with a run of each of two layers; return its path, as text."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "trials.sqlite", QWEN)
    fill(tmp_path / "trials.sqlite", end=False)
    return "trials.sqlite"


@pytest.fixture
def listed(capsys):
    """Return a function that runs `moetune trials` and gives the lines of stdout."""

    def listed(*options):
        assert main.run(["trials", *options]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        assert max(map(len, printed.out.splitlines()[:-1]), default=0) <= 80  # the last line has the whole path
        return printed.out.splitlines()

    return listed


def rows(lines):
    """Return the first cells of the rows of trials: token count and subject."""
    return [tuple(line.split()[:2]) for line in lines if re.match(r" *(\d+|all)  [a-z_]+ ", line)]


def test_the_newest_trials_stand_first_under_their_runs(store, listed):
    lines = listed("--store", store)
    assert lines[0] == "e8_h512_i256_k2_bf16 on NVIDIA H200, cuda"
    assert re.fullmatch(
        r"run [0-9a-f]{8}, \d{4}-\d\d-\d\d \d\d:\d\d; triton 3\.6\.0, torch 2\.11\.0, driver 580\.1", lines[1]
    )
    assert rows(lines)[:3] == [("1", "down"), ("16", "combine"), ("16", "routing")]
    assert len(rows(lines)) == 20
    assert re.fullmatch(r" +1  down +slow +g16x\d+x\d+ w\d p\d", lines[4].rstrip())
    assert re.fullmatch(r"20 of \d+ trials from trials\.sqlite; --limit N shows more", lines[-1])


def test_a_limit_goes_on_into_earlier_runs(store, listed):
    lines = listed("--store", store, "--limit", "1000")
    assert [line for line in lines if " on NVIDIA" in line] == [
        "e8_h512_i256_k2_bf16 on NVIDIA H200, cuda",
        "e128_h2048_i768_k8_bf16 on NVIDIA H200, cuda",
    ]
    assert lines[-1] == f"{len(rows(lines))} trials from trials.sqlite"


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--tokens", "1"], lambda tokens, subject: tokens == "1"),
        (["--tokens", "1,16", "--subject", "gate_up"], lambda tokens, subject: subject == "gate_up"),
        (["--subject", "combine"], lambda tokens, subject: subject == "combine"),
        (["--tokens", "64"], lambda tokens, subject: False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_filters_keep_what_they_name(store, listed, capsys, options, kept):
    every = rows(listed("--store", store, "--limit", "1000"))
    wanted = [row for row in every if kept(*row)]
    if wanted:
        assert rows(listed("--store", store, "--limit", "1000", *options)) == wanted
    else:
        assert main.run(["trials", "--store", store, *options]) == 0
        assert capsys.readouterr() == ("", f"note: none of the {len(every)} trials in trials.sqlite match\n")


@pytest.mark.parametrize(
    "options",
    [
        ["--model", "qwen3-30b-a3b"],
        ["--shape", "e128_h2048_i768_k8_bf16"],
        ["--hidden", "2048", "--inter", "768", "--experts", "128", "--top-k", "8"],
        ["--hidden", "2048", "--inter", "1536", "--experts", "256", "--top-k", "8", "--tp", "2", "--ep", "2"],
    ],
    ids=" ".join,
)
def test_a_layer_is_named_as_in_a_sweep_or_by_its_key(store, listed, options):
    lines = listed("--store", store, *options)
    assert [line for line in lines if " on NVIDIA" in line] == ["e128_h2048_i768_k8_bf16 on NVIDIA H200, cuda"]


def test_a_config_file_names_a_layer_too(store, listed, tmp_path):
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048}
    config |= {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "silu"}))
    assert listed("--store", store, "--config", "config.json")[0] == "e128_h2048_i768_k8_bf16 on NVIDIA H200, cuda"


def test_a_layer_that_is_not_there_is_told_with_those_that_are(store, capsys):
    assert main.run(["trials", "--store", store, "--model", "mixtral-8x7b"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "match, whose layers are e128_h2048_i768_k8_bf16, e8_h512_i256_k2_bf16\n" in printed.err


def test_failures_stand_with_their_whole_reason(store, listed):
    for options in (["--failed"], ["--kind", "slow"]):
        lines = listed("--store", store, *options)
        assert rows(lines) == [("1", "down"), ("1", "down")]
        words = " ".join(" ".join(line[line.index("reason") :].split()) if "reason" in line else line for line in lines)
        assert "slow" in words
        text = " ".join(" ".join(lines).split())
        assert all(word in text for word in REASON.split())
        assert lines[-1] == "2 trials from trials.sqlite"


def test_the_best_stand_by_token_count_and_subject(store, listed):
    lines = listed("--store", store, "--shape", SHAPE.key, "--best", "1", "--subject", "gate_up")
    assert rows(lines) == [("1", "gate_up"), ("16", "gate_up")]
    assert [line.split()[2] for line in lines if "gate_up " in line] == ["12.0", "12.0"]
    assert lines[1] == "triton 3.6.0, torch 2.11.0, driver 580.1"
    verified = listed("--store", store, "--best", "9", "--verified")
    assert {subject for _, subject in rows(verified)} == {"gate_up", "down"}  # routing and combine are not compared
    assert len(rows(listed("--store", store, "--best", "9"))) > 20  # the screen's limit is for plain lists


def test_whole_layers_show_both_tiles(store, listed):
    default = heuristic_plan(SHAPE, 16, TARGETS["sm_90"])
    every = [trial for trial in trials(SHAPE, 16) if trial.subject is Subject.GATE_UP]
    layer = replace(every[0], subject=Subject.LAYER, choice=default, outcome=measured(1234.5))
    fill(Path("layers.sqlite"), extra=[layer])
    (line,) = [one for one in listed("--store", "layers.sqlite", "--subject", "layer") if "layer " in one[:14]]
    assert re.search(rf"v  [gtp]16x{default.gate_up.block_n} [gtp]{default.down.block_n}$", line.rstrip()), line
    Path("layers.sqlite").unlink()


def test_runs_are_listed_with_their_counts_and_whether_they_ended(store, listed):
    lines = listed("--store", store, "--runs")
    found = [line.split()[-4:] for line in lines if re.match(r"[0-9a-f]{8} ", line)]
    count = str(fill(Path("count.sqlite")))
    assert found == [[SHAPE.key, count, "1", "no"], [QWEN.key, count, "1", "yes"]]
    assert lines[0] == "NVIDIA H200, cuda: triton 3.6.0, torch 2.11.0, driver 580.1"
    assert len([line for line in listed("--store", store, "--runs", "--limit", "1") if SHAPE.key in line]) == 1


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_an_export_holds_all_that_match_and_says_where(store, listed, suffix):
    (line,) = listed("--store", store, "--export", f"out/found.{suffix}", "--tokens", "16")
    count = int(line.split()[0])
    assert line == f"{count} trials: out/found.{suffix}"
    text = Path(f"out/found.{suffix}").read_text().splitlines()
    assert len(text) == count + (suffix == "csv")
    assert count > 20
    if suffix == "jsonl":
        assert {json.loads(line)["tokens"] for line in text} == {16}
    (line,) = listed("--store", store, "--export", f"best.{suffix}", "--best", "1", "--limit", "3")
    assert line == f"3 trials: best.{suffix}"


def test_an_export_without_pyarrow_is_one_sentence(store, monkeypatch, capsys):
    monkeypatch.setattr("moetune.store.export.find_spec", lambda name: None)
    assert main.run(["trials", "--store", store, "--export", "found.parquet"]) == 3
    printed = capsys.readouterr()
    assert printed.err == (
        "error: a .parquet file needs pyarrow, which is not installed; run `pip install 'moetune[parquet]'`, "
        "or export to .csv or .jsonl\n"
    )
    assert not Path("found.parquet").exists()


def test_a_recording_is_read_as_a_store_is(no_gpu, listed):
    ship(no_gpu, SHAPE)
    path = no_gpu / f"{SHAPE.key}.jsonl.xz"
    Path("tiny.jsonl.xz").symlink_to(path)
    lines = listed("--store", "tiny.jsonl.xz", "--best", "1", "--tokens", "256")
    assert rows(lines) == [("256", "gate_up"), ("256", "down"), ("256", "routing"), ("256", "combine")]
    assert listed("--store", "tiny.jsonl.xz", "--limit", "1")[1].startswith("recording tiny.jsonl.xz, 2026-01-01 00:00")
    assert any(line.startswith("recorded  2026-01-01 00:00") for line in listed("--store", "tiny.jsonl.xz", "--runs"))
    (line,) = listed("--store", "tiny.jsonl.xz", "--export", "tiny.csv")
    assert int(line.split()[0]) == len([trial for tokens in (1, 16, 256) for trial in trials(SHAPE, tokens)])


def test_the_users_own_store_is_the_default_one(listed, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    fill(default_store_path())
    assert listed()[0].startswith("e8_h512_i256_k2_bf16 on")
    monkeypatch.setenv("MOETUNE_STORE", str(tmp_path / "other.sqlite"))
    fill(tmp_path / "other.sqlite", QWEN)
    assert listed()[0].startswith("e128_h2048_i768_k8_bf16 on")


def test_a_store_that_a_sweep_writes_just_now_is_listed(store, listed):
    with Store(Path(store)) as writing:
        run = writing.begin(made_for(SHAPE), "moetune sweep")
        run.record(next(iter(trials(SHAPE, 1))))
        assert rows(listed("--store", store, "--limit", "1")) == [("1", "gate_up")]


def test_foreign_words_do_not_steer_the_terminal(tmp_path, monkeypatch, listed):
    monkeypatch.chdir(tmp_path)
    fill(Path("odd.sqlite"), driver="\x1b[31m[red]580")
    connection = sqlite3.connect("odd.sqlite")
    reason = '{"kind":"wrong","reason":"\\u001b[2J[bold]off\\u0007 by two"}'
    connection.execute("UPDATE trials SET outcome = ? WHERE outcome LIKE '%slow%'", [reason])
    connection.commit()
    connection.close()
    text = "\n".join(listed("--store", "odd.sqlite", "--failed"))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]580" in text
    assert "[bold]off" in "".join(text.split())


# What is no store


def make_empty(path):
    path.touch()


def make_without_trials(path):
    Store(path).close()


def make_foreign(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.commit()
    connection.close()


def make_damaged(path):
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 4080)


def make_text(path):
    path.write_text("tokens,us\n" * 200)


def make_newer(path):
    fill(path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    connection.close()


def make_cut_off(path):
    fill(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    path.write_bytes(path.read_bytes()[:6000])


def make_odd_row(path):
    fill(path)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE trials SET choice = '{}' WHERE id = 3")
    connection.commit()
    connection.close()


def make_folder(path):
    path.mkdir()


def make_pipe(path):
    os.mkfifo(path)


def make_none(path):
    pass


FILES = [
    (make_empty, 0, 0, "note: .* holds no trials yet"),
    (make_without_trials, 0, 0, "note: .* holds no trials yet"),
    (make_none, 2, 3, "error: .*(does not exist; give a trial store|no trial store at .* yet: run `moetune sweep`)"),
    (make_foreign, 2, 1, "error: .* is no trial store of moetune; name another with --store"),
    (make_damaged, 2, 1, "error: the trial store .* is damaged"),
    (make_text, 2, 1, "error: the trial store .* is damaged"),
    (make_newer, 2, 1, "error: .* was written by a newer moetune .*; upgrade moetune"),
    (make_cut_off, 2, 1, "error: the trial store .* is damaged"),
    (make_odd_row, 2, 1, "error: the trial store .* holds a row that cannot be read .*trial 3"),
    (make_folder, 2, 3, "error: .*(is no plain file|no trial store at .* yet)"),
    (make_pipe, 2, 3, "error: .*(is no plain file|no trial store at .* yet)"),
]


@pytest.mark.parametrize(
    "options", [["--limit", "1000"], ["--best", "2"], ["--export", "found.csv"], ["--runs"]], ids=" ".join
)
@pytest.mark.parametrize(("make", "named", "default", "said"), FILES, ids=[file[0].__name__ for file in FILES])
def test_a_file_that_is_no_store_is_one_sentence(tmp_path, monkeypatch, capsys, make, named, default, said, options):
    """A file that was named is bad input; the user's own store that went bad is a failure, and none at all is missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = default_store_path()
    path.parent.mkdir()
    make(path)
    before = path.read_bytes() if path.is_file() else None
    if make is make_odd_row and options == ["--runs"]:  # the runs are sound
        assert main.run(["trials", "--store", str(path), "--runs"]) == 0
        return
    for code, given in ((named, ["--store", str(path)]), (default, [])):
        assert main.run(["trials", *given, *options]) == code
        printed = capsys.readouterr()
        if options == ["--runs"]:
            said = said.replace("holds no trials", "holds no runs")
        assert re.match(said, printed.err), printed.err
        assert printed.err.count("\n") == 1
        exported = code == 0 and "--export" in options
        assert printed.out == ("0 trials: found.csv\n" if exported else "")
        assert Path("found.csv").exists() is exported
    assert (path.read_bytes() if path.is_file() else None) == before
    assert [entry.name for entry in tmp_path.iterdir() if entry.name not in ("moetune", "found.csv")] == []


@pytest.mark.parametrize("content", [b"", b"\xfd7zXZ\0garbage", b"{}\n"])
def test_a_file_that_is_no_recording_is_one_sentence(tmp_path, capsys, content):
    path = tmp_path / "odd.jsonl.xz"
    path.write_bytes(content)
    assert main.run(["trials", "--store", str(path)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "is no usable recording" in printed.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tokens", "many"], "--tokens takes whole numbers"),
        (["--subject", "attention"], "'attention' is not one of"),
        (["--kind", "tired"], "'tired' is not one of"),
        (["--best", "0"], "--best"),
        (["--limit", "-3"], "--limit"),
        (["--model", "mixtrl-8x7b"], "did you mean mixtral-8x7b"),
        (["--model", "mixtral-8x7b", "--shape", "e8_h4096_i14336_k2_bf16"], "--shape and the options of a layer"),
        (["--best", "2", "--failed"], "--best takes trials that have a time"),
        (["--best", "2", "--kind", "slow"], "--best takes trials that have a time"),
        (["--runs", "--best", "2"], "--runs lists runs"),
        (["--runs", "--verified"], "--runs lists runs"),
        (["--runs", "--export", "runs.csv"], "--runs lists runs"),
        (["--export", "found.xlsx"], "ends in .csv, .parquet, .jsonl"),
        (["--export", "."], "ends in .csv, .parquet, .jsonl"),
        (["--export", "folder.csv"], "is a folder; give a file"),
        (["--export", "trials.sqlite/found.csv"], "--export"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_one_sentence(store, capsys, options, said):
    Path("folder.csv").mkdir()
    assert main.run(["trials", "--store", store, *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_listing_loads_neither_torch_nor_pandas(store):
    import subprocess

    code = (
        "import sys; from moetune.cli.main import run; code = run(['trials', '--store', sys.argv[1], '--best', '1']); "
        "sys.exit(code or 100 * bool({'torch', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry))
    done = subprocess.run(
        [sys.executable, "-c", code, store], env=environment, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
