"""Kill a live sweep with SIGKILL at random moments, let it end, and judge what it leaves: the long version of the tests.

    python3 benchmarks/kill_sweep.py OUT.json --kills 5
    python3 benchmarks/kill_sweep.py OUT.json -- --model qwen3-30b-a3b --tokens 1,64     # options behind -- go to the sweeps

One sweep is timed undisturbed. Then the same command is started and killed: the moments are spread over that time, one random
moment in each part of it. A sweep that ended before its moment proves that the one before was resumed; it is judged, and
the kill is made in a new store and Triton cache. The last sweep is left to end.

After each kill: the store is sound, tables are whole, no process is left. After each end: all token counts of the undisturbed
sweep are there, nothing is left half-written, and no screening that had ended was made again without a gain. A sweep tells of
what it does only through its store, so that is where the last is seen: a later run with another row of a choice whose row it
knew, with no more samples, no verification and no new failure. Exit code 1 when anything is not as it must be.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from command import STOP_AFTER_S, Stopwatch, heading, needed_gpu, save, split, started
from processes import left_behind, tree
from sweeps import Ended, Place, Sweep

from moetune.errors import RunError, TableError, UsageError
from moetune.outcome import Failed, FailureKind, Stage
from moetune.store import ListedTrial, Store, TrialFilter

LIMIT_S = 300.0  # of one sweep: one that takes longer hangs
ORPHANS_S = 10.0  # a driver takes a moment to take back what a killed process held
LEAST_KILL_S = 0.1

StartSweep = Callable[[Place, Sequence[str]], Sweep]


@dataclass(kw_only=True)
class Kills:
    """What was done and found so far.

    Args:
        undisturbed_s: seconds of the sweep that was not killed.
        moments: seconds after which sweeps were killed.
        kept: screenings that killed sweeps had left at each moment.
        resumed: sweeps that came to their end in a store that a killed one had left.
        faults: sentences of what was not as it must be.
    """

    undisturbed_s: float
    moments: list[float] = field(default_factory=list[float])
    kept: list[int] = field(default_factory=list[int])
    resumed: int = 0
    faults: list[str] = field(default_factory=list[str])


def main(arguments: Sequence[str], start: StartSweep = Sweep) -> int:
    """Run the whole and return the exit code."""
    own, sweep_options = split(arguments)
    options = parsed(own)
    gpu, clock = needed_gpu(), Stopwatch(options.stop_after)
    layer = sweep_options or ["--model", "qwen3-30b-a3b"]
    head = heading(gpu) | {"sweep_options": layer, "seed": options.seed}
    with tempfile.TemporaryDirectory(prefix="moetune-kills-") as name:
        killer = Killer(Path(name), layer, start, clock)
        found = killer.run(options.kills, random.Random(options.seed))  # noqa: S311  # moments, not secrets
    save(options.out, head | asdict(found))
    for fault in found.faults:
        print(fault)
    print(f"{len(found.moments)} kills, {found.resumed} resumed to the end, {len(found.faults)} faults")
    return int(bool(found.faults))


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; raises UsageError where nothing would be killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop-after", type=float, default=STOP_AFTER_S, metavar="SECONDS")
    options = parser.parse_args(arguments)
    if options.kills < 1:
        raise UsageError(f"--kills must be at least 1, got {options.kills}")
    return options


@dataclass
class Killer:
    """Sweeps in places of their own under ``folder``, all with the same options."""

    folder: Path
    options: Sequence[str]
    start: StartSweep
    clock: Stopwatch

    def run(self, kills: int, draw: random.Random) -> Kills:
        """Kill so often and return what was found; fewer times where time runs out, which is a fault."""
        whole = self._place(0)
        undisturbed = self._to_the_end(whole)
        counts = sorted(whole.table().entries)
        found = Kills(undisturbed_s=round(undisturbed.seconds, 1))
        print(f"undisturbed: {undisturbed.seconds:.1f} s, {len(counts)} token counts", flush=True)
        number, since = 1, 0
        while len(found.moments) < kills and self.clock.left_s > 2 * undisturbed.seconds:
            part = len(found.moments)
            after_s = max(undisturbed.seconds * (part + draw.random()) / kills, LEAST_KILL_S)
            if self._kill(self._place(number), after_s, found):
                since += 1
                continue
            found.resumed += since > 0
            found.faults += judged(self._place(number), counts)
            number, since = number + 1, 0
        if since:
            last = self._place(number)
            ended = self._to_the_end(last)
            print(f"resumed and ended after {ended.seconds:.1f} s", flush=True)
            found.resumed += 1
            found.faults += judged(last, counts)
        if len(found.moments) < kills:
            found.faults.append(f"there was time for {len(found.moments)} of {kills} kills only")
        return found

    def _place(self, number: int) -> Place:
        return Place(self.folder / str(number), self.folder / f"triton-{number}")

    def _to_the_end(self, place: Place) -> Ended:
        """Run a sweep; raises RunError when it does not come to a good end."""
        with self.start(place, self.options) as sweep:
            ended = sweep.wait(min(LIMIT_S, self.clock.left_s))
        if ended is None:
            raise RunError(f"a sweep did not end within {min(LIMIT_S, self.clock.left_s):.0f} s")
        if ended.failure:
            raise RunError(ended.failure)
        return ended

    def _kill(self, place: Place, after_s: float, found: Kills) -> bool:
        """Start a sweep and kill it after so many seconds; False when it had ended before."""
        with self.start(place, self.options) as sweep:
            ended = sweep.wait(after_s)
            if ended is None:
                family = tree(sweep.process.pid)
                sweep.kill()
                found.faults += [
                    f"process {one.pid} ({one.part}) outlives its sweep" for one in left_behind(family, ORPHANS_S)
                ]
        if ended is not None and ended.failure:
            raise RunError(ended.failure)
        found.faults += unsound(place)
        kept = screenings(place)
        how = "had ended" if ended is not None else "killed"
        print(
            f"{how} after {after_s if ended is None else ended.seconds:.1f} s, {kept} screenings in the store",
            flush=True,
        )
        if ended is None:
            found.moments.append(round(after_s, 2))
            found.kept.append(kept)
        return ended is None


def judged(place: Place, counts: Sequence[int]) -> Iterator[str]:
    """Yield what is wrong where a sweep came to its end after others were killed."""
    yield from unsound(place)
    if damage_of(place.store):
        return
    missing = sorted(set(counts) - set(place.table().entries))
    if missing:
        yield f"the table of a resumed sweep lacks {', '.join(map(str, missing))} tokens"
    yield from (f"left behind: {path.name}" for path in sorted(place.tables.rglob("*.tmp")))
    yield from (f"a screening that gained nothing: {text}" for text in repeated(place.store))
    with Store.to_read(place.store) as store:
        runs = store.runs()
    if runs[-1].ended_at is None:
        yield "the last run is not marked as ended"
    if len({run.provenance for run in runs}) > 1:
        yield "the runs of one store depend on different things, so none could use what another left"
    if any(run.backend != "cuda" for run in runs):
        yield "a sweep replayed recorded trials: nothing was measured"


def unsound(place: Place) -> Iterator[str]:
    """Yield what is wrong with the store and the tables as they lie there."""
    if place.store.exists():
        damage = damage_of(place.store)
        if damage:
            yield f"the store is damaged: {damage}"
    if any(place.tables.rglob("*.json")):
        try:
            yield from (f"a table is not whole: {fault}" for fault in place.table().faults)
        except (RunError, TableError) as error:
            yield f"a table cannot be read: {error}"


def damage_of(store: Path) -> str | None:
    """Return what SQLite itself finds wrong with the file, None when it is sound."""
    try:
        with closing(sqlite3.connect(store)) as connection:
            found = connection.execute("PRAGMA integrity_check").fetchall()
    except sqlite3.DatabaseError as error:
        return str(error)
    return None if found == [("ok",)] else str(found[:3])


def screenings(place: Place) -> int:
    """Return how many screenings lie in the store; a damaged one, which is a fault of its own, counts for none."""
    if not place.store.exists() or damage_of(place.store):
        return 0
    with Store.to_read(place.store) as store:
        return sum(listed.trial.stage is Stage.SCREEN for listed in store.newest(TrialFilter()))


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
    sys.exit(started(main))
