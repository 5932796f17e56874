"""What outlives a sweep: the trial store (SQLite) and recordings (compressed JSON lines). Loads no torch."""

from moetune.store.database import STORE_VARIABLE, default_store_path, lock_dirs
from moetune.store.errors import RecordingError, StoreError
from moetune.store.provenance import Provenance
from moetune.store.recording import (
    SHIPPED_DIRECTORY,
    Recording,
    load_recording,
    replay_commands,
    save_recording,
    shipped_recording,
    shipped_shapes,
)
from moetune.store.rows import ListedTrial, RunRow, TrialFilter, TrialRow, fastest, newest_recorded, recorded_run
from moetune.store.store import Run, Store, latest

__all__ = [
    "SHIPPED_DIRECTORY",
    "STORE_VARIABLE",
    "ListedTrial",
    "Provenance",
    "Recording",
    "RecordingError",
    "Run",
    "RunRow",
    "Store",
    "StoreError",
    "TrialFilter",
    "TrialRow",
    "default_store_path",
    "fastest",
    "latest",
    "load_recording",
    "lock_dirs",
    "newest_recorded",
    "recorded_run",
    "replay_commands",
    "save_recording",
    "shipped_recording",
    "shipped_shapes",
]
