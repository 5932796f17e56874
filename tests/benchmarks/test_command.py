"""Errors are sentences with an exit code, results are whole files."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import Stopwatch, save, split, started

from moetune.errors import MissingError, RunError, UnsupportedDeviceError, UsageError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunError("the sweep failed"), 1),
        (UsageError("--pairs must be positive"), 2),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("division by zero"), 1),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(capsys, error, code):
    def main(arguments):
        raise error

    assert started(main) == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["sweep_times", "repeatability", "memory_growth", "kill_sweep"])
def test_without_a_gpu_nothing_is_started(tmp_path, monkeypatch, name):
    def no_gpu(index):
        raise UnsupportedDeviceError("no CUDA device 0")

    monkeypatch.setattr("command.gpu_of", no_gpu)
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(MissingError, match="measures a GPU, and there is none here: no CUDA device 0"):
        importlib.import_module(name).main([str(tmp_path / "out.json")])
    assert not (tmp_path / "out.json").exists()


def test_a_script_without_a_gpu_says_so_in_one_line_with_exit_code_3(tmp_path):
    environment = {"PYTHONPATH": ":".join(entry for entry in sys.path if entry), "CUDA_VISIBLE_DEVICES": ""}
    script = [sys.executable, str(BENCHMARKS / "sweep_times.py"), str(tmp_path / "out.json")]
    done = subprocess.run(script, check=False, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("sweep_times.py: this benchmark measures a GPU")
    assert done.stderr.count("\n") == 1


def test_arguments_behind_the_dashes_go_to_the_sweep():
    assert split(["out.json", "--repeat", "2"]) == (["out.json", "--repeat", "2"], [])
    assert split(["out.json", "--", "--budget", "60", "--"]) == (["out.json"], ["--budget", "60", "--"])


def test_results_that_cannot_be_written_leave_the_old_ones(tmp_path):
    out = tmp_path / "out.json"
    save(out, {"sweeps": [1]})
    with pytest.raises(TypeError):
        save(out, {"sweeps": [object()]})
    assert json.loads(out.read_text()) == {"sweeps": [1]}
    assert list(tmp_path.iterdir()) == [out]


def test_a_stopwatch_stops_at_zero():
    now = [5.0]
    clock = Stopwatch(10.0, lambda: now[0])
    now[0] = 9.0
    assert clock.left_s == 6.0
    now[0] = 99.0
    assert clock.left_s == 0.0
