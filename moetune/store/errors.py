"""What can go wrong with the files of the store.

RunError
├── StoreError       the trial store cannot be opened, read or written
└── RecordingError   a recording is damaged, too large, or not one of ours
"""

from __future__ import annotations

from moetune.errors import RunError


class StoreError(RunError):
    """The trial store cannot be opened, read or written."""


class RecordingError(RunError):
    """A recording is damaged, too large, or not one of ours."""
