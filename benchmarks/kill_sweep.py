"""Kill a sweep with SIGKILL at random moments, let it end, and judge what it leaves. On a GPU the long version of the tests.

Example, from the project's root, on a machine with a GPU:

    python benchmarks/kill_sweep.py --kills 6 -- --model qwen3-30b-a3b --tokens 1,64 --budget 20

Prints one line per kill, then what was found: store sound, table whole, screenings that a later run repeated although it gained
nothing by it (0 is right). Exit code 1 when anything is not as it must be.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from moetune.outcome import Failed, FailureKind, Stage
from moetune.store import ListedTrial, Store, TrialFilter
from moetune_kernels.table import TunedTable


def main() -> int:
    """Run the whole and return the exit code."""
    parser = argparse.ArgumentParser(description="Kill a sweep at random moments and judge what it leaves.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("sweep", nargs="*", help="options of `moetune sweep`, behind --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, tables = folder / "trials.sqlite", folder / "tables"
        command = [sys.executable, "-m", "moetune", "sweep", *given.sweep, "--store", str(store), "--out", str(tables)]
        faults = list(killed_again_and_again(command, given.kills, random.Random(given.seed), folder))  # noqa: S311  # moments, not secrets
        faults += [f"a screening that gained nothing: {text}" for text in repeated(store)]
        unfinished = [path.name for path in tables.rglob("*.tmp")]
        faults += [f"left behind: {text}" for text in unfinished]
    for fault in faults:
        print(fault)
    print(f"{given.kills} kills, {len(faults)} faults")
    return min(len(faults), 1)


def killed_again_and_again(command: list[str], kills: int, draw: random.Random, folder: Path) -> Iterator[str]:
    """Time the sweep in a folder of its own, kill it at moments spread over that time, let it end; yield faults."""
    timed = [part.replace(str(folder), str(folder / "timed")) for part in command]
    began_s = time.monotonic()
    subprocess.run(timed, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lasts_s = time.monotonic() - began_s
    for part in range(kills):
        after_s = lasts_s * (part + draw.random()) / kills
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(after_s)
            how = "had ended"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            how = "killed"
        trials = yield from unsound(folder)
        print(f"{how} after {after_s:.1f} s of {lasts_s:.1f} s, {trials} trials in the store", flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    yield from unsound(folder)


def unsound(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the store and the tables as they lie there; return the number of trials."""
    store = folder / "trials.sqlite"
    trials = 0
    if store.exists():
        with closing(sqlite3.connect(store)) as connection:
            found = connection.execute("PRAGMA integrity_check").fetchall()
            if found != [("ok",)]:
                yield f"the store is damaged: {found[:3]}"
        with Store.to_read(store) as opened:
            trials = opened.count(TrialFilter())
    for path in (folder / "tables").rglob("*.json"):
        table = TunedTable.parse(path.read_bytes(), str(path))
        yield from (f"{path.name}: {fault}" for fault in table.faults)
    return trials


def repeated(store: Path) -> Iterator[str]:
    """Yield the screenings of a live sweep that an earlier run had already, with as many samples and as well verified."""
    known: dict[object, ListedTrial] = {}
    with Store.to_read(store) as opened:
        for listed in reversed(list(opened.newest(TrialFilter()))):
            trial = listed.trial
            if trial.stage is not Stage.SCREEN or listed.run.backend != "cuda":
                continue
            key = (listed.run.provenance, trial.subject, trial.tokens, trial.choice)
            before = known.get(key)
            if before is not None and before.run.run != listed.run.run and not gained(before, listed):
                yield f"{trial.subject.value} at {trial.tokens} tokens: {trial.choice}"
            known[key] = listed


def gained(before: ListedTrial, after: ListedTrial) -> bool:
    """Whether the later screening knows more: more samples, a comparison with the reference, or that it is wrong.

    A slow one is tried again where the kernel that had set the pace turned out to be wrong.
    """
    first, second = before.trial, after.trial
    if isinstance(first.outcome, Failed):
        return first.outcome.kind is FailureKind.SLOW
    if isinstance(second.outcome, Failed):
        return True
    return second.outcome.samples > first.outcome.samples or (second.verified and not first.verified)


if __name__ == "__main__":
    sys.exit(main())
