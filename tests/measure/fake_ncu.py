"""A script that plays ncu, and what tests ask of the processes that a reader of counters starts."""

from __future__ import annotations

import os
import stat
import sys
import textwrap
import time
from pathlib import Path

from moetune.outcome import Source

HEAD = f"""#!{sys.executable}
import json, os, pathlib, subprocess, sys, time
args = sys.argv[1:]
place = args.index("--log-file")
log, program = pathlib.Path(args[place + 1]), args[place + 2:]
jobs, launches = map(pathlib.Path, args[-2:])
with open(pathlib.Path(__file__).with_name("starts"), "a") as starts:
    print(os.getpid(), file=starts)
starts = pathlib.Path(__file__).with_name("starts").read_text().split()
def wait():
    while not jobs.exists():
        time.sleep(0.005)
def count(value):
    metrics = args[args.index("--metrics") + 1].split(",")
    rows = [",".join(f'"{{m}}"' for m in ["Kernel Name", *metrics]), ",".join('""' for _ in range(len(metrics) + 1))]
    notes = []
    for index, job in enumerate(json.loads(jobs.read_text())["jobs"]):
        notes += [{{"job": index, "part": "gate_up", "kernel": "g"}}, {{"job": index, "done": True}}]
        rows.append(",".join(f'"{{v}}"' for v in ["g", *[value] * len(metrics)]))
    launches.write_text("\\n".join(map(json.dumps, notes)) + "\\n")
    log.write_text("\\n".join(rows) + "\\n")
"""


def install(tmp_path, body):
    """Write the script; its body can ``wait`` for jobs, ``count`` them, and run ``program``."""
    script = tmp_path / "ncu"
    script.write_text(HEAD + textwrap.dedent(body))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


def processes(tmp_path):
    """Return who runs with a path below ``tmp_path`` on the command line: all that a run of ncu starts."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if str(tmp_path).encode() in line and int(folder.name) != os.getpid():
            found.append(line.split(b"\0"))
    return found


def until(holds, within_s=60.0):
    """Return whether ``holds()`` came true in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def starts(tmp_path):
    return len((tmp_path / "starts").read_text().split()) if (tmp_path / "starts").exists() else 0


def assert_counted(found):
    assert found
    assert {tokens: figures.issue_efficiency.source for tokens, figures in found.items()} == dict.fromkeys(
        found, Source.COUNTER
    )


def assert_nothing_left(tmp_path, within_s=30.0):
    assert until(lambda: not processes(tmp_path), within_s), processes(tmp_path)
    assert until(lambda: not list(tmp_path.glob("moetune-counters-*")), within_s)
