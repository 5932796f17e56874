"""Nsight Compute: where it is, what forbids it, and its command line around a program of ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moetune.measure.counter_rights import BUSY, FORBIDDEN, Blocked, forbidden
from moetune.measure.leashed import last_line
from moetune.outcome import Failed, FailureKind

_PLACES = ("/usr/local/cuda/bin/ncu", "/usr/local/cuda-*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")

INSTALL = (
    "sudo apt-get install nsight-compute (from NVIDIA's repository, https://developer.nvidia.com/nsight-compute)",
    "then put the folder that holds ncu on PATH",
)


@dataclass(frozen=True, slots=True)
class NcuRun:
    """What one run left behind: ncu's log, and everything that ncu and the program printed."""

    log: str
    printed: str
    exit_code: int


def find_ncu() -> str | None:
    """Return the path of ncu: on PATH, else the newest in the places where NVIDIA installs it."""
    on_path = shutil.which("ncu")
    if on_path is not None:
        return on_path
    for pattern in _PLACES:
        found = [path for path in Path("/").glob(pattern.lstrip("/")) if os.access(path, os.X_OK)]
        if found:
            return str(max(found, key=_version_in))
    return None


def blocked() -> Blocked | None:
    """Say what keeps this process from reading counters by ncu, or None when nothing known does. Runs no ncu."""
    found = forbidden()
    if found is None and find_ncu() is None:
        return Blocked("Nsight Compute's ncu is neither on PATH nor under /usr/local/cuda or /opt/nvidia", INSTALL)
    return found


def ncu_version() -> str | None:
    """Return ncu's version, e.g. ``2025.3.1.0``, or None where it does not say."""
    ncu = find_ncu()
    if ncu is None:
        return None
    try:
        done = subprocess.run([ncu, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^Version (\S+)", done.stdout, re.MULTILINE)
    return found.group(1) if found else None


def command(metrics: Sequence[str], log: Path, program: Sequence[str]) -> list[str]:
    """Return the command that runs ``program`` under ncu, which writes what it counts to ``log``.

    It collects ``metrics`` between cudaProfilerStart and -Stop. They must fit one pass, or kernels are replayed. Caches
    are flushed before each profiled launch; clocks are left alone.

    Raises:
        FileNotFoundError: there is no ncu.
    """
    ncu = find_ncu()
    if ncu is None:
        raise FileNotFoundError(None, "Nsight Compute's ncu was not found")
    return [
        ncu,
        *("--profile-from-start", "off"),
        *("--target-processes", "all"),
        *("--replay-mode", "kernel"),
        *("--cache-control", "all"),  # cold, as the timer is
        *("--clock-control", "none"),  # never touch a shared card's clocks
        *("--metrics", ",".join(metrics)),
        "--csv",
        *("--page", "raw"),
        *("--print-units", "base"),  # --csv alone prints Mbyte and usecond, whatever its manual says
        *("--log-file", str(log)),
        *program,
    ]


def explain(run: NcuRun) -> Failed:
    """Turn a run without results into one sentence."""
    text = f"{run.log}\n{run.printed}"
    if "ERR_NVGPUCTRPERM" in text:
        return Failed(FailureKind.RESOURCES, f"{FORBIDDEN} (ERR_NVGPUCTRPERM)")
    if "driver resource was unavailable" in text:
        return Failed(FailureKind.RESOURCES, BUSY)
    errors = [line.removeprefix("==ERROR==").strip() for line in text.splitlines() if line.startswith("==ERROR==")]
    told = [error for error in errors if "application returned an error code" not in error]
    said = told[0] if told else last_line(run.printed) or "no output"
    return Failed(FailureKind.LAUNCH, f"ncu ended with exit code {run.exit_code} and no counters: {said[:300]}")


def _version_in(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]
