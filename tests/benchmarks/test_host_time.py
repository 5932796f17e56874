"""The host's time of a sweep, measured against a GPU process that answers at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from host_time import Meter

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_a_part_s_time_is_without_the_parts_that_it_calls():
    meter = Meter()
    with meter.within("outer"):
        time.sleep(0.02)
        with meter.within("inner"):
            time.sleep(0.05)
        time.sleep(0.01)
    assert meter.seconds["inner"] == pytest.approx(0.05, abs=0.015)
    assert meter.seconds["outer"] == pytest.approx(0.03, abs=0.015)
    assert meter.calls == {"outer": 1, "inner": 1}


def test_a_sweep_shows_every_part_and_what_it_decided():
    command = [sys.executable, str(BENCHMARKS / "host_time.py"), "--tokens", "1,64", "--repeat", "2"]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    ended = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    parts = {line[:28].strip(): line[28:].split() for line in lines}
    for part in ("questions and answers", "search", "trial store", "table", "pace", "events and screen"):
        milliseconds, calls, *_ = parts[part]
        assert float(milliseconds) > 0.0, part
        assert int(calls) > 1, part
    assert float(parts["candidates"][0]) > 10.0  # in a process of its own, where nothing is remembered
    assert sum(line.startswith("table ") and ", trials " in line for line in lines) == 1  # two sweeps, one decision
