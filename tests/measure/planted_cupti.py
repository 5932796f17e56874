"""A worker that says it counted by CUPTI, or fails as the environment's PLANTED_CUPTI says; it loads nothing.

Each start is a line of the file ``cupti_starts`` beside the folder that the worker shares with its owner.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main():
    deed, jobs, launches = os.environ["PLANTED_CUPTI"], Path(sys.argv[2]), Path(sys.argv[3])
    chip, metrics, l2_bytes = sys.argv[4:]
    assert (chip, int(l2_bytes) > 0) == ("GH100", True)
    assert not [name for name in metrics.split(",") if name.startswith("launch__")]
    with (jobs.parent.parent / "cupti_starts").open("a") as starts:
        print(os.getpid(), file=starts)
    if deed == "refuse-early":
        launches.write_text(json.dumps({"refused": "the CUPTI of this test is shy"}) + "\n")
        return
    if deed == "die-early":
        sys.exit("Segmentation fault")
    while not jobs.exists():
        time.sleep(0.005)
    with launches.open("w") as notes:
        for index, _ in enumerate(json.loads(jobs.read_text())["jobs"]):
            values = dict.fromkeys(metrics.split(","), 7.0)
            tell(notes, {"job": index, "part": "gate_up", "kernel": "g", "values": values})
            end(deed, notes)
            tell(notes, {"job": index, "done": True})
            if deed == "half":
                tell(notes, {"refused": "the CUPTI of this test tires soon"})
                return
        tell(notes, {"seconds": {"load": 0.5}})


def end(deed, notes):
    """End as planted, after one launch."""
    if deed == "refuse":
        tell(notes, {"refused": "the CUPTI of this test is shy"})
        sys.exit()
    if deed == "crash":
        notes.write('{"job": 0, "par')  # and no more of it
        notes.flush()
        os.abort()
    if deed == "hang":
        time.sleep(600)


def tell(notes, value):
    """Write one line at once."""
    notes.write(json.dumps(value) + "\n")
    notes.flush()


if __name__ == "__main__":
    main()
