"""A module of trials that notes in the file ``IMPORT_WITNESS`` that it was imported, and breaks there if asked to."""

from __future__ import annotations

import os
from pathlib import Path

import planted_gpu

open_planted = planted_gpu.open_planted

with Path(os.environ["IMPORT_WITNESS"]).open("a") as notes:
    notes.write(f"{os.getpid()}\n")
if "IMPORT_BREAKS" in os.environ:
    raise ImportError(f"attempt {len(Path(os.environ['IMPORT_WITNESS']).read_text().split())} failed")
