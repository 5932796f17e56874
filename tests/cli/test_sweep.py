"""``moetune sweep``: what it asks of the tuner, and a whole replay through the command."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moetune.cli import main
from moetune.engine.events import GapProbed
from moetune.errors import RunError
from moetune.outcome import ClockSpan
from moetune_kernels.shape import WeightFormat


@pytest.fixture
def asked(monkeypatch):
    """Replace the tuner with one that notes the request and fails; return the list of requests."""
    requests = []

    def note(request, on_event, ahead):
        requests.append(request)
        raise RunError("noted")

    monkeypatch.setattr("moetune.tuning.sweep", note)
    return requests


def test_every_option_reaches_the_tuner(asked, monkeypatch, tmp_path):
    options = ["sweep", "--model", "mixtral-8x7b", "--tp", "2", "--ep", "4", "--format", "fp16", "--tokens", "64,1"]
    options += [
        "--budget",
        "240",
        "--device",
        "1",
        "--fresh",
        "--out",
        str(tmp_path / "tables"),
        "--routing",
        "zipf:1.3",
    ]
    options += ["--noise", "1.5", "--strict"]
    options += ["--store", str(tmp_path / "s.sqlite"), "--record", str(tmp_path / "r.jsonl.xz")]
    monkeypatch.setattr(sys, "argv", ["moetune", *options])
    assert main.run(options) == 1
    (request,) = asked
    assert request.shape.key == "e2_h4096_i7168_k2_fp16"
    assert request.shape.format is WeightFormat.FP16
    assert request.tokens == (1, 64)
    assert (request.budget_s, request.device_index, request.beside, request.fresh) == (240.0, 1, (), True)
    assert (request.routing.text, request.noise, request.strict) == ("zipf:1.3", 0.015, True)
    assert "--routing zipf:1.3" in request.command
    assert request.out_dir == tmp_path / "tables"
    assert request.store_path == tmp_path / "s.sqlite"
    assert request.record == tmp_path / "r.jsonl.xz"
    assert request.model == "mixtral-8x7b"
    assert request.command.startswith("moetune sweep --model mixtral-8x7b --tp 2")


def test_the_defaults_are_the_documented_ones(asked):
    main.run(["sweep"])
    (request,) = asked
    assert request.shape.key == "e64_h4096_i14336_k2_bf16"
    assert len(request.tokens) == 18
    assert request.tokens[-1] == 16384
    assert (request.budget_s, request.out_dir, request.store_path) == (None, None, None)
    assert (request.device_index, request.beside) == (0, None)  # every idle GPU of the first one's model
    assert not request.fresh
    assert (request.routing.text, request.noise, request.strict) == ("uniform", 0.005, False)


def test_the_store_may_come_from_the_environment(asked, monkeypatch, tmp_path):
    monkeypatch.setenv("MOETUNE_STORE", str(tmp_path / "env.sqlite"))
    main.run(["sweep"])
    monkeypatch.setenv("MOETUNE_STORE", "")
    main.run(["sweep"])
    assert [request.store_path for request in asked] == [tmp_path / "env.sqlite", None]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "mixtrl-8x7b"], "did you mean mixtral-8x7b"),
        (["--model", "qwen3-30b-a3b", "--tp", "7"], "sizes that do"),
        (["--model", "deepseek-v3"], "--format bf16"),
        (["--format", "int4"], "--format bf16 or --format fp16"),
        (["--config", "nowhere/config.json"], "No such file"),
        (["--budget", "nan"], "--budget must be"),
        (["--target", "sm_75"], "--target must be one of"),
        (["--target", "sm_90", "--record", "r.jsonl.xz"], "leave --out, --record and --routing away"),
        (["--store", "."], "is a folder; give a file"),
        (["--noise", "-1"], "--noise must be from 0 to 20 percent, got -1"),
        (["--noise", "nan"], "--noise must be from 0 to 20 percent"),
        (["--noise", "50"], "--noise must be from 0 to 20 percent, got 50"),
        (["--routing", "zipf:0"], "exponent must be from"),
        (["--routing", "skewed"], "--routing takes uniform, zipf"),
        (["--routing", "nowhere.npz"], "cannot be read (No such file"),
        (["--target", "sm_90", "--routing", "hot"], "leave --out, --record and --routing away"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence_and_never_reaches_the_tuner(asked, capsys, options, said):
    assert main.run(["sweep", *options]) == 2
    printed = capsys.readouterr()
    assert asked == []
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_notes_on_the_layer_are_progress_not_results(asked, capsys):
    main.run(["sweep", "--model", "gpt-oss-20b", "--format", "bf16"])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "note: gpt-oss-20b: the real layer adds expert biases" in printed.err


def test_a_replay_writes_a_table_and_says_that_no_gpu_was_used(recorded, capsys):
    assert main.run(["sweep", *recorded, "--tokens", "1,16,256"]) == 0
    printed = capsys.readouterr()
    table = Path("moetune-replay/nvidia_h200/e8_h512_i256_k2_bf16.json")
    lines = printed.out.splitlines()
    assert lines[-1] == f"table: {table}"
    assert "No GPU was used" in printed.out
    assert max(len(line) for line in lines) <= 80
    value = json.loads(table.read_text())
    assert value["backend"] == "replay"
    assert list(value["entries"]) == ["1", "16", "256"]
    for entry in value["entries"].values():
        assert entry["plan"]["gate_up"]["block_n"] == 64
        assert entry["median_us"] <= entry["baseline_us"]
    assert "replay: e8_h512_i256_k2_bf16 on NVIDIA H200" in printed.err


def test_a_replay_gives_the_same_table_twice(recorded, capsys):
    tables = []
    for _ in range(2):
        assert main.run(["sweep", *recorded, "--tokens", "1,16"]) == 0
        tables.append(json.loads(Path(capsys.readouterr().out.splitlines()[-1].removeprefix("table: ")).read_text()))
    assert tables[0]["entries"] == tables[1]["entries"]


def test_a_shape_without_a_recording_exits_with_3_and_the_ways_forward(recorded, capsys):
    assert main.run(["sweep", "--experts", "16"]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--target sm_90" in printed.err
    command = " ".join(["moetune sweep", *recorded])
    assert f"replay a recorded layer with `{command}`," in printed.err
    assert main.run([*shlex.split(command)[1:], "--tokens", "1", "--out", "elsewhere"]) == 0
    assert not Path("moetune-replay").exists()


def test_a_trace_of_another_layer_exits_with_2_and_names_what_differs(recorded, capsys, tmp_path):
    np.savez(tmp_path / "t.npz", topk_ids=np.array([[0, 1, 2]]))
    assert main.run(["sweep", *recorded, "--routing", str(tmp_path / "t.npz")]) == 2
    assert "records top-3 choices, the layer takes top-2" in capsys.readouterr().err


def test_another_routing_than_the_recorded_one_exits_with_3(recorded, capsys):
    assert main.run(["sweep", *recorded, "--tokens", "1", "--routing", "zipf"]) == 3
    assert "only the recorded trials of uniform routing, asked was zipf:1.1" in capsys.readouterr().err


def test_ctrl_c_in_a_sweep_exits_with_130(monkeypatch, capsys):
    def interrupted(request, on_event, ahead):
        raise KeyboardInterrupt

    monkeypatch.setattr("moetune.tuning.sweep", interrupted)
    assert main.run(["sweep"]) == 130
    assert "same command continues" in capsys.readouterr().err


AHEAD = """
import sys
from moetune.cli import main
from moetune.measure import ahead

class Process:
    def close(self):
        print("closed")

def started():
    print([name for name in ("moetune.tuning", "moetune.engine.session", "numpy", "rich") if name in sys.modules])
    return Process()

ahead._started, ahead.may_have_gpu = started, lambda: True
sys.exit(main.run("sweep --hidden 512 --inter 256 --experts 8 --top-k 2 --tokens 1".split()))
"""


def test_processes_are_started_before_the_tuner_is_loaded_and_ended_where_nothing_needs_them(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", AHEAD], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    said = done.stdout.splitlines()
    assert said[:2] == ["[]", "closed"]
    assert "no CUDA GPU here" in done.stderr


def test_the_closing_lines_say_what_was_left_undone():
    from moetune.cli.sweep import closing_lines

    result = SimpleNamespace(
        trials=120,
        failures=Counter(wrong=1, slow=30),
        store_path=Path("s.sqlite"),
        stopped_early=True,
        backend="cuda",
        table_path=Path("t.json"),
        kept=(1, 64),
        clocks=ClockSpan(
            sm_mhz=(1155, 1980),
            sm_max_mhz=1980,
            memory_mhz=(3201, 3201),
            temperature_c=(41, 67),
            power_w=(120.4, 698.1),
            throttle=("power cap",),
        ),
        held_down={"power cap": (4096, 16384)},
        probes=(GapProbed(2, 1, 0.003), GapProbed(5, 4, 0.012), GapProbed(32, 16, 0.25)),
        table=SimpleNamespace(entries={1: None, 4: None, 16: None, 32: None}),
    )
    assert closing_lines(result) == [  # pyright: ignore[reportArgumentType]
        "120 trials, dropped: 30 slow, 1 wrong, kept in s.sqlite",
        "The budget ended the search early; the same command continues from the store.",
        "Kept from an earlier sweep with the same kernels, versions and GPU: 1, 64 tokens.",
        "between the entries: at most 1.2% behind the best plan known there",
        "(3 token counts timed, 1 became entries; the worst is 5 tokens, served by 4)",
        "clocks: SM 1155 to 1980 of 1980 MHz, memory 3201 MHz, 41 to 67 C, 120 to 698 W",
        "power cap in the finals of 4096, 16384 tokens",
        "table: t.json",
    ]


def test_what_a_recording_lacks_is_counted_apart_from_what_was_dropped():
    from moetune.cli.sweep import closing_lines

    result = SimpleNamespace(
        trials=1000,
        failures=Counter(unrecorded=842, slow=30),
        store_path=Path("s.sqlite"),
        stopped_early=False,
        backend="cuda",
        table_path=Path("t.json"),
        kept=(),
        clocks=None,
        held_down={},
        probes=(),
    )
    counted = closing_lines(result)[0]  # pyright: ignore[reportArgumentType]
    assert counted == "1000 trials, 842 not recorded, dropped: 30 slow, kept in s.sqlite"


def test_clocks_that_the_driver_hides_leave_their_place_and_no_line_of_nothing():
    from moetune.cli.sweep import clock_lines

    def lines(**clocks):
        return clock_lines(SimpleNamespace(clocks=ClockSpan(**clocks), held_down={}))  # pyright: ignore[reportArgumentType]

    assert lines(sm_mhz=(1980, 1980)) == ["clocks: SM 1980 MHz"]
    assert lines(temperature_c=(30, 31)) == ["clocks: 30 to 31 C"]
    assert lines() == []


def test_the_help_page_shows_token_counts_as_they_are_typed(capsys):
    main.run(["sweep", "--help"])
    assert "1,2,4,...,16384" in capsys.readouterr().out


def test_a_target_prints_what_the_compiler_says_of_each_candidate(monkeypatch, capsys):
    from moetune.outcome import Compiled, Failed, FailureKind

    def compile_all(shape, device, choices):
        for number, choice in enumerate(choices):
            if number % 2:
                yield choice, Failed(FailureKind.RESOURCES, "needs too much")
            else:
                yield choice, Compiled(registers=123, spills=4, smem_bytes=98_304, block_size=128)

    monkeypatch.setattr("moetune.measure.offline.compile_offline", compile_all)
    assert main.run(["sweep", "--model", "qwen3-30b-a3b", "--target", "sm_90", "--tokens", "16"]) == 0
    header, first, second, *rest = capsys.readouterr().out.splitlines()
    assert header.split() == ["kernel", "structure", "tile", "warps", "depth", "registers", "spills", "smem", "B"]
    assert first.split()[-3:] == ["123", "4", "98304"]
    assert second.endswith("resources: needs too much")
    assert len(rest) >= 20


def test_a_target_for_which_nothing_compiles_is_a_failure(monkeypatch, capsys):
    from moetune.outcome import Failed, FailureKind

    monkeypatch.setattr(
        "moetune.measure.offline.compile_offline",
        lambda shape, device, choices: ((choice, Failed(FailureKind.COMPILE, "no ptxas")) for choice in choices),
    )
    assert main.run(["sweep", "--target", "sm_90", "--tokens", "16"]) == 1
    assert "no kernel" in capsys.readouterr().err


def test_a_spent_budget_stops_handing_out_kernels(capsys):
    from moetune.cli.target import within

    assert list(within(0.0, [])) == []
    handed_out = list(within(-1.0, [1, 2, 3]))  # pyright: ignore[reportArgumentType]
    assert handed_out == []
    assert "3 kernels were not compiled" in capsys.readouterr().err
    assert list(within(None, [1, 2])) == [1, 2]  # pyright: ignore[reportArgumentType]


def test_a_strict_sweep_on_a_shared_gpu_exits_with_3_and_the_fix(monkeypatch, capsys, tmp_path):
    from moetune.measure.card import CardState
    from moetune.measure.clocks import ClockReading, OtherProcess
    from moetune.measure.gpu_name import Gpu
    from moetune.tuning import Bed

    state = CardState(reading=ClockReading(throttle_bits=1), others=(OtherProcess(4242, None),), busy_percent=0)
    backend = SimpleNamespace(card=lambda: state, close=lambda: None)
    bed = Bed(backend, None, "", Path(), Path())  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr("moetune.tuning._gpu_is_there", lambda: True)
    monkeypatch.setattr("moetune.tuning.gpu_of", lambda index: Gpu(name="NVIDIA H200", index=index, uuid="GPU-1"))
    monkeypatch.setattr("moetune.tuning.lock_dirs", lambda: [tmp_path])
    monkeypatch.setattr("moetune.tuning._gpu_backend", lambda request, ahead: backend)
    monkeypatch.setattr("moetune.tuning._gpu_bed", lambda backend, request: bed)
    assert main.run(["sweep", "--strict"]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "error: --strict: this GPU is shared with process 4242; stop that, or take another GPU with --device\n"
    )
