"""The processes of a running sweep and their memory, read from /proc."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TUNER, GPU, COMPILE, OTHER = "tuner", "gpu", "compile", "other"
_MODULES = {GPU: b"moetune.measure.gpu_worker", COMPILE: b"moetune.measure.compile_worker"}
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Process:
    """One process: ``started`` tells it from a later one with the same id; ``part`` is what it does for the sweep."""

    pid: int
    parent: int
    started: int
    part: str


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host bytes of one part of a sweep.

    Args:
        rss: resident; what processes share is counted for each of them.
        pss: the same with shared pages counted once; None where the kernel does not tell.
    """

    rss: int
    pss: int | None


def tree(root: int, proc: Path = PROC) -> list[Process]:
    """Return the process ``root`` and all that descend from it; none when it is gone."""
    everyone = {pid: found for pid in _pids(proc) if (found := _process(pid, root, proc)) is not None}
    family, wanted = [everyone[root]] if root in everyone else [], [root]
    while wanted:
        parent = wanted.pop()
        children = [one for one in everyone.values() if one.parent == parent]
        family += children
        wanted += [one.pid for one in children]
    return family


def memory(family: Sequence[Process], proc: Path = PROC) -> dict[str, HostMemory]:
    """Return the memory of each part of a sweep; a process that ends meanwhile has none."""
    found: dict[str, HostMemory] = {}
    for part in (TUNER, GPU, COMPILE, OTHER):
        mine = [one for one in family if one.part == part]
        shares = [_kilobytes(proc / str(one.pid) / "smaps_rollup", "Pss:") for one in mine]
        resident = [_kilobytes(proc / str(one.pid) / "status", "VmRSS:") for one in mine]
        # A process without memory of its own any more (a zombie) has neither line.
        alive = [(rss, pss) for rss, pss in zip(resident, shares, strict=True) if rss is not None]
        known = [pss for _, pss in alive if pss is not None]
        found[part] = HostMemory(
            rss=1024 * sum(rss for rss, _ in alive),
            pss=1024 * sum(known) if len(known) == len(alive) else None,
        )
    return found


def left_behind(family: Sequence[Process], limit_s: float, proc: Path = PROC) -> list[Process]:
    """Wait up to ``limit_s`` for processes to end, and return those that still run."""
    deadline = time.monotonic() + limit_s
    while left := [one for one in family if _lives(one, proc)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(_PAUSE_S)
    return []


def _pids(proc: Path) -> list[int]:
    return [int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal()]


def _process(pid: int, root: int, proc: Path) -> Process | None:
    fields = _stat(pid, proc)
    if fields is None:
        return None
    part = TUNER if pid == root else OTHER
    with suppress(OSError):
        line = (proc / str(pid) / "cmdline").read_bytes()
        part = next((name for name, module in _MODULES.items() if module in line.split(b"\0")), part)
    return Process(pid, int(fields[1]), int(fields[19]), part)


def _stat(pid: int, proc: Path) -> list[bytes] | None:
    """Return the fields of ``stat`` from the state on; the command's name before it may hold blanks and brackets."""
    try:
        return (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # it ended
        return None


def _lives(process: Process, proc: Path) -> bool:
    fields = _stat(process.pid, proc)
    return fields is not None and int(fields[19]) == process.started and fields[0] not in (b"Z", b"X")


def _kilobytes(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text("ascii", "replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), None)
