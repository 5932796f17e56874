"""The search space: what can run, what a user allows, what is worth compiling, what lies next to it. Loads no torch."""

from moetune.space.enumerate import reason_class
from moetune.space.left import counts_text, require_something, shared_heights, telling
from moetune.space.limits import FREE, Limits, SpaceFile, reports_of
from moetune.space.load import sensible_block_ms
from moetune.space.space import DEFAULT_LIMIT, Space, candidates, recorded_space
from moetune.space.space_file import read_space_file

__all__ = [
    "DEFAULT_LIMIT",
    "FREE",
    "Limits",
    "Space",
    "SpaceFile",
    "candidates",
    "counts_text",
    "read_space_file",
    "reason_class",
    "recorded_space",
    "reports_of",
    "require_something",
    "sensible_block_ms",
    "shared_heights",
    "telling",
]
