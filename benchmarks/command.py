"""What all benchmarks do alike: errors as one sentence with an exit code, the results as one JSON file, a time to stop.

Exit codes are those of `moetune`: 0 done and the goal is met, 1 not met or failed while running, 2 bad usage, 3 this machine
lacks something, 130 Ctrl-C.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moetune.cli.failure import INTERRUPTED, explain
from moetune.errors import MissingError, MoetuneError
from moetune.measure.gpu_name import Gpu, gpu_of
from moetune.whole_file import write_whole

STOP_AFTER_S = 540.0  # many machines are lent for commands of ten minutes: what was measured must be written by then


def started(main: Callable[[Sequence[str]], int]) -> int:
    """Run a benchmark on this process's arguments and return its exit code; an error is one sentence on stderr."""
    try:
        return main(sys.argv[1:])
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  # whatever it is, the reader gets a sentence and a code
        sentence, code = explain(error)
        print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
        return code


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a benchmark's own arguments, and behind ``--`` those of the sweeps that it runs.

    >>> split(["out.json", "--", "--budget", "60"])
    (['out.json'], ['--budget', '60'])
    """
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:place]), list(arguments[place + 1 :])


def needed_gpu() -> Gpu:
    """Return the GPU that a sweep would use; makes no CUDA context.

    Raises:
        MissingError: there is none, and a sweep would replay recorded trials.
    """
    try:
        return gpu_of(0)
    except MoetuneError as error:
        raise MissingError(f"this benchmark measures a GPU, and there is none here: {error}") from None


def heading(gpu: Gpu) -> dict[str, Any]:
    """Return what every JSON begins with: the command, when, and on what."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "began_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": str(gpu),
        "cores": len(os.sched_getaffinity(0)),
    }


def save(path: Path, results: Mapping[str, Any]) -> None:
    """Write the results so far, all or nothing: a benchmark that is killed leaves what it had."""
    write_whole(path, (json.dumps(results, indent=1) + "\n").encode())


class Stopwatch:
    """The seconds that are left until ``limit_s`` after this was made."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + limit_s

    @property
    def left_s(self) -> float:
        """Return the seconds left, 0 when the time is over."""
        return max(self._end_s - self._clock(), 0.0)
