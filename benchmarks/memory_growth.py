"""How much memory a sweep is worth a thousand candidates later: the tuner, its GPU process, its compile processes, the GPU.

    python3 benchmarks/memory_growth.py OUT.json --candidates 1000

An exhaustive sweep of a small layer is watched from outside, until it has launched so many different kernels, and then ended.
A row is the lowest of some looks within two seconds, because a compiler at work takes memory for a moment. Growth is from the
first row to the last. Exit code 1 when the GPU's is 1% of its memory or more, the host's 200 MB or more, or the sweep failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from command import STOP_AFTER_S, Stopwatch, heading, needed_gpu, save, started
from gpu_watch import Nvml
from processes import COMPILE, GPU, OTHER, TUNER, HostMemory, memory, tree
from stored import tried
from sweeps import Ended, Place, Sweep

from moetune.errors import RunError, UsageError

LAYER = ["--hidden", "1024", "--inter", "512", "--experts", "8", "--top-k", "2", "--tokens", "64"]
OPTIONS = [*LAYER, "--strategy", "exhaustive"]  # 1,668 gate-up configs of an H200, then 1,107 of down
EVERY = 100
GPU_GOAL, HOST_GOAL_BYTES = 0.01, 200_000_000
JUDGED = (TUNER, GPU, COMPILE)  # others are ptxas and the C compiler, which live for a second
LOOKS, LOOK_PAUSE_S, PAUSE_S = 8, 0.25, 0.1


class Running(Protocol):
    """A sweep that runs: :class:`sweeps.Sweep`."""

    def wait(self, limit_s: float) -> Ended | None:
        """Return how it ended, None when it still runs after ``limit_s``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was held after so many candidates, in bytes: of the host by part of the sweep, and of the whole GPU."""

    candidates: int
    host: dict[str, HostMemory]
    gpu: int
    gpu_pids: tuple[int, ...]

    def host_bytes(self, measure: str) -> int:
        """The host's bytes of the parts that are judged, as ``pss`` or ``rss``."""
        return sum(getattr(self.host[part], measure) for part in JUDGED)


def main(arguments: Sequence[str]) -> int:
    """Watch a sweep and judge it."""
    options = parsed(arguments)
    clock, gpu = Stopwatch(options.stop_after), needed_gpu()
    nvml = Nvml(gpu)
    with tempfile.TemporaryDirectory(prefix="moetune-memory-") as name:
        place = Place(Path(name), Path(name) / "triton")
        with Sweep(place, OPTIONS) as sweep:

            def look(candidates: int) -> Look:
                return lowest([seen(sweep.process.pid, nvml, candidates, pause_s=LOOK_PAUSE_S) for _ in range(LOOKS)])

            looks = looks_until(options.candidates, sweep, lambda: tried(place.store), look, clock=clock)
            sweep.stop()
    growth = growth_of(looks, nvml.memory_bytes()[1])
    rows = [asdict(one) for one in looks]
    save(options.out, heading(gpu) | {"sweep_options": OPTIONS, "looks": rows, "growth": growth})
    print("\n".join(lines_of(looks, growth)))
    return int(not growth["met"])


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; raises UsageError where growth has no two rows to show in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--candidates", type=int, default=1000)
    parser.add_argument("--stop-after", type=float, default=STOP_AFTER_S, metavar="SECONDS")
    options = parser.parse_args(arguments)
    if options.candidates < 2 * EVERY:
        raise UsageError(f"--candidates must be at least {2 * EVERY}, got {options.candidates}")
    return options


def looks_until(
    wanted: int,
    sweep: Running,
    candidates: Callable[[], int],
    look: Callable[[int], Look],
    *,
    clock: Stopwatch,
    pause_s: float = PAUSE_S,
) -> list[Look]:
    """Look whenever another hundred candidates were tried, until all were.

    Raises:
        RunError: the sweep ended before, or the time did.
    """
    looks: list[Look] = []
    due = EVERY
    while due <= wanted:
        done = candidates()
        if done >= due:
            looks.append(look(done))
            due = (done // EVERY + 1) * EVERY
        ended = sweep.wait(pause_s)
        if due <= wanted and (ended is not None or not clock.left_s):
            why = "the time was over" if ended is None else ended.failure or "the sweep came to its end"
            raise RunError(f"{why} after {done} of {wanted} candidates")
    return looks


def seen(pid: int, nvml: Nvml, candidates: int, *, pause_s: float) -> Look:
    """Return what is held a moment later."""
    time.sleep(pause_s)
    family = tree(pid)
    gpu_pids = tuple(one.pid for one in family if one.part == GPU)
    return Look(candidates=candidates, host=memory(family), gpu=nvml.memory_bytes()[0], gpu_pids=gpu_pids)


def lowest(looks: Sequence[Look]) -> Look:
    """Return the lowest of each part over several looks."""

    def of(part: str) -> HostMemory:
        shares = [one.host[part].pss for one in looks]
        known = [pss for pss in shares if pss is not None]
        return HostMemory(min(one.host[part].rss for one in looks), min(known) if len(known) == len(shares) else None)

    host = {part: of(part) for part in (*JUDGED, OTHER)}
    last = looks[-1]
    return replace(last, candidates=looks[0].candidates, host=host, gpu=min(one.gpu for one in looks))


def measure_of(looks: Sequence[Look]) -> str:
    """Return how the host's memory is judged: with shared pages counted once where the kernel tells."""
    return "pss" if all(one.host[part].pss is not None for one in looks for part in JUDGED) else "rss"


def growth_of(looks: Sequence[Look], card_bytes: int) -> dict[str, Any]:
    """Return how much was held at the end beyond the first row, in bytes, and whether the goals are met.

    Raises:
        RunError: the GPU process was not seen, or not the same one at both ends.
    """
    first, last = looks[0], looks[-1]
    if not first.host[GPU].rss or not last.host[GPU].rss:
        raise RunError("no GPU process was seen under the sweep, so its memory is not in these figures")
    if first.gpu_pids != last.gpu_pids:
        raise RunError("the GPU process was replaced on the way, so its growth is not in these figures; run it again")
    measure = measure_of(looks)
    host, gpu = last.host_bytes(measure) - first.host_bytes(measure), last.gpu - first.gpu
    return {
        "host_bytes": host,
        "host_measure": measure,
        "gpu_bytes": gpu,
        "gpu_share": gpu / card_bytes,
        "met": host < HOST_GOAL_BYTES and gpu < GPU_GOAL * card_bytes,
    }


def lines_of(looks: Sequence[Look], growth: dict[str, Any]) -> list[str]:
    """Return the table, in MB of 10^6 bytes, and the verdict."""
    head = [f"{part} rss/pss" for part in (*JUDGED, OTHER)]
    lines = ["candidates" + "".join(f"{name:>20s}" for name in head) + "     host MB      GPU MB"]
    for one in looks:
        parts = "".join(f"{_text(one.host[part]):>20s}" for part in (*JUDGED, OTHER))
        lines.append(
            f"{one.candidates:10d}{parts} {_mb(one.host_bytes(growth['host_measure'])):11.0f} {_mb(one.gpu):11.0f}"
        )
    host, gpu, share = _mb(growth["host_bytes"]), _mb(growth["gpu_bytes"]), growth["gpu_share"]
    span = f"from {looks[0].candidates} to {looks[-1].candidates} candidates"
    lines.append(
        f"growth {span}: host {host:+.0f} MB ({growth['host_measure']}; goal under {_mb(HOST_GOAL_BYTES):.0f} MB)"
    )
    lines.append(f"growth {span}: GPU {gpu:+.0f} MB, {share:+.2%} of its memory (goal under {GPU_GOAL:.0%})")
    lines.append("goals met" if growth["met"] else "GOALS MISSED")
    return lines


def _text(held: HostMemory) -> str:
    return f"{_mb(held.rss):.0f}/{'-' if held.pss is None else f'{_mb(held.pss):.0f}'}"


def _mb(count: int) -> float:
    return count / 1e6


if __name__ == "__main__":
    sys.exit(started(main))
