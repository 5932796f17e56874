from __future__ import annotations

import gzip
import json
import lzma
import pickle
from dataclasses import replace

import pytest

from moetune.outcome import ClockSpan, Failed, FailureKind, Figure, Measured, Source, Stage, Subject, Trial
from moetune.store import Provenance, Recording, RecordingError, load_recording, recording, save_recording
from moetune.store.codec import outcome_from_json, outcome_to_json, trial_to_json
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=1024, inter=512, local_experts=8, top_k=2, experts=64)
CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
MEASURED = Measured(
    median_us=50.0,
    spread_us=0.25,
    samples=9,
    flops_per_byte=Figure(16.0, Source.ANALYTICAL),
    bandwidth_gbps=Figure(4000.0, Source.ANALYTICAL),
    issue_efficiency=Figure.unavailable("no clock is known"),
)
TRIALS = (
    Trial(subject=Subject.GATE_UP, tokens=16, choice=CONFIG, stage=Stage.SCREEN, outcome=MEASURED, verified=True),
    Trial(subject=Subject.COMBINE, tokens=16, choice=0, stage=Stage.SCREEN, outcome=MEASURED),
    Trial(
        subject=Subject.LAYER,
        tokens=16,
        choice=LayerPlan(gate_up=CONFIG, down=CONFIG),
        stage=Stage.FINAL,
        outcome=Failed(FailureKind.LAUNCH, "an illegal memory access"),
    ),
)
RECORDING = Recording(
    provenance=Provenance(
        backend="cuda",
        shape=SHAPE,
        device=TARGETS["sm_90"],
        kernels_sha256="0" * 64,
        triton="3.6.0",
        torch="2.11.0",
        driver="580.1",
    ),
    ceilings={"bytes_per_s": 4.2e12, "flops": 7.8e14},
    bounds={16: 33.5},
    measured_at="2026-12-01T08:00:00+00:00",
    command="moetune sweep --record tiny.jsonl.xz",
    trials=TRIALS,
)


def lines(**changes):
    made = [recording._header(RECORDING), *(trial_to_json(trial) for trial in TRIALS)]
    made[0] |= changes
    return made


def written(path, made):
    text = "".join(json.dumps(line) + "\n" for line in made)
    path.write_bytes(lzma.compress(text.encode()))
    return path


@pytest.mark.parametrize("name", ["tiny.jsonl.xz", "tiny.jsonl.gz"])
def test_a_recording_comes_back_as_it_went_in(tmp_path, name):
    path = save_recording(RECORDING, tmp_path / "new" / name)
    assert load_recording(path) == RECORDING
    assert load_recording(path).provenance.shape.experts == 64
    assert [entry.name for entry in path.parent.iterdir()] == [name]


def test_the_same_trials_make_the_same_file(tmp_path):
    one, two = (save_recording(RECORDING, tmp_path / name).read_bytes() for name in ("a.jsonl.gz", "b.jsonl.gz"))
    assert one == two


def test_a_name_without_a_known_ending_is_refused(tmp_path):
    with pytest.raises(RecordingError, match=r"ends in \.jsonl\.xz"):
        save_recording(RECORDING, tmp_path / "tiny.json")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(b"", "cut off", id="empty"),
        pytest.param(pickle.dumps({"a": 1}), "usable recording", id="a-pickle"),
        pytest.param(lzma.compress(b"[]\n"), "no recording header", id="another-json"),
        pytest.param(lzma.compress(b"\n"), "usable recording", id="an-empty-line"),
        pytest.param(lzma.compress(b"[" * 60_000 + b"\n"), "usable recording", id="nested-too-deeply"),
        pytest.param(lzma.compress(b"x" * (200 << 10)), "longer than", id="one-endless-line"),
        pytest.param(lzma.compress(b'{"moetune_recording": 1'), "cut off", id="no-last-newline"),
        pytest.param(lzma.compress(b"\xff\xfe\n"), "usable recording", id="bad-utf-8"),
    ],
)
def test_a_file_that_is_no_recording_is_one_sentence(tmp_path, data, said):
    path = tmp_path / "odd.jsonl.xz"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=said):
        load_recording(path)


@pytest.mark.parametrize("name", ["bomb.jsonl.xz", "bomb.jsonl.gz"])
def test_a_decompression_bomb_is_stopped(tmp_path, monkeypatch, name):
    monkeypatch.setattr(recording, "MAX_TEXT_BYTES", 4 << 20)
    header, trial, *_ = (json.dumps(line).encode() + b"\n" for line in lines())
    text = header + trial * 20_000
    path = tmp_path / name
    path.write_bytes(lzma.compress(text) if name.endswith("xz") else gzip.compress(text))
    assert path.stat().st_size < 100_000
    with pytest.raises(RecordingError, match="bytes of text"):
        load_recording(path)


def test_a_file_too_large_to_be_a_recording_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "MAX_FILE_BYTES", 10)
    path = save_recording(RECORDING, tmp_path / "tiny.jsonl.xz")
    with pytest.raises(RecordingError, match="larger than 10 bytes"):
        load_recording(path)


@pytest.mark.parametrize("name", ["tiny.jsonl.xz", "tiny.jsonl.gz"])
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path, name):
    path = save_recording(RECORDING, tmp_path / name)
    data = path.read_bytes()
    for length in range(1, len(data), 29):
        path.write_bytes(data[:length])
        with pytest.raises(RecordingError):
            load_recording(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"moetune_recording": 2}, "format 2", id="newer-format"),
        pytest.param({"trials": 99}, "says 99 trials", id="trials-missing"),
        pytest.param({"ceilings": {"bytes_per_s": -1.0, "flops": 1.0}}, "bytes_per_s must be", id="negative-ceiling"),
        pytest.param({"ceilings": {"flops": 1.0}}, "bytes_per_s", id="ceiling-missing"),
        pytest.param({"bounds": {"0": 1.0}}, "token count", id="bound-of-no-tokens"),
        pytest.param({"bounds": {"١٢": 1.0}}, "token count", id="foreign-digits"),
        pytest.param({"bounds": {"16": 1e999}}, "usable recording", id="endless-bound"),
        pytest.param({"provenance": {"shape": {}}}, "provenance", id="provenance-missing"),
        pytest.param({"bounds": [1, 2]}, "usable recording", id="bounds-of-another-type"),
    ],
)
def test_a_header_with_a_wrong_field_is_refused(tmp_path, changes, said):
    path = written(tmp_path / "odd.jsonl.xz", lines(**changes))
    with pytest.raises(RecordingError, match=said):
        load_recording(path)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        pytest.param(("outcome", "median_us"), float("nan"), id="time-is-nan"),
        pytest.param(("outcome", "median_us"), -5.0, id="time-is-negative"),
        pytest.param(("outcome", "median_us"), True, id="time-is-a-bool"),
        pytest.param(("outcome", "source"), "guess", id="unknown-source"),
        pytest.param(("tokens",), 1 << 40, id="too-many-tokens"),
        pytest.param(("verified",), "yes", id="verified-is-a-text"),
        pytest.param(("choice", "block_n"), 48, id="block-n-no-power-of-two"),
        pytest.param(("choice", "extra"), 1, id="unknown-config-field"),
        pytest.param(("subject",), "attention", id="unknown-subject"),
        pytest.param(("extra",), 1, id="unknown-trial-field"),
    ],
)
def test_a_trial_with_a_wrong_field_is_refused_by_line(tmp_path, where, value):
    made = lines()
    target = made[1]
    for name in where[:-1]:
        target = target[name]
    target[where[-1]] = value
    with pytest.raises(RecordingError, match="line 2"):
        load_recording(written(tmp_path / "odd.jsonl.xz", made))


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(RecordingError, match="cannot read the recording"):
        load_recording(tmp_path / "none.jsonl.xz")


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").write_text("in the way")
    with pytest.raises(RecordingError, match="cannot write the recording"):
        save_recording(RECORDING, tmp_path / "folder" / "tiny.jsonl.xz")
    assert replace(RECORDING) == RECORDING
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_the_rounds_of_a_measurement_come_back_as_they_went_in():
    outcome = replace(MEASURED, times_us=(12.345, 12.5, 1000.125))
    assert outcome_from_json(outcome_to_json(outcome)) == outcome
    assert "times_us" not in outcome_to_json(MEASURED)


@pytest.mark.parametrize(
    "times_us", [5, None, "12", [0.0], [-1.0], [True], ["12"], [float("inf")], [None], [1.0] * 1001, {"0": 1.0}]
)
def test_rounds_that_are_no_times_are_refused(times_us):
    with pytest.raises(ValueError, match="time"):
        outcome_from_json(outcome_to_json(MEASURED) | {"times_us": times_us})


CLOCKS = ClockSpan(
    sm_mhz=(1155, 1980),
    sm_max_mhz=1980,
    memory_mhz=(3201, 3201),
    temperature_c=(-3, 67),
    power_w=(120.5, 698.1),
    throttle=("power cap",),
)


@pytest.mark.parametrize("clocks", [CLOCKS, ClockSpan(), ClockSpan(throttle=()), ClockSpan(power_w=(1.0, 2.0))])
def test_the_clocks_of_a_measurement_come_back_as_they_went_in(clocks):
    outcome = replace(MEASURED, clocks=clocks)
    assert outcome_from_json(json.loads(json.dumps(outcome_to_json(outcome)))) == outcome
    assert "clocks" not in outcome_to_json(MEASURED)


@pytest.mark.parametrize(
    "damage",
    [
        {"sm_mhz": 1980}, {"sm_mhz": [1980]}, {"sm_mhz": [1980, 1155]}, {"sm_mhz": [1.5, 2.5]}, {"sm_mhz": ["1", "2"]},
        {"sm_mhz": [0, 10**9]}, {"sm_mhz": [True, True]}, {"power_w": [0.0, float("nan")]}, {"sm_max_mhz": "fast"},
        {"throttle": "power cap"}, {"throttle": [1]}, {"throttle": ["x" * 200]}, {"throttle": ["x"] * 20}, {"fan": 3},
    ],
    ids=str,
)  # fmt: skip
def test_clocks_that_cannot_be_are_refused(damage):
    value = outcome_to_json(replace(MEASURED, clocks=CLOCKS))
    with pytest.raises(ValueError, match=r"clocks|must be|unknown"):
        outcome_from_json(value | {"clocks": value["clocks"] | damage})
    with pytest.raises(ValueError, match="clocks must be an object"):
        outcome_from_json(value | {"clocks": [1]})
