"""The search space: what can run, what is worth compiling, and what lies next to a config. Loads no torch."""

from moetune.space.enumerate import reason_class
from moetune.space.load import sensible_block_ms
from moetune.space.space import DEFAULT_LIMIT, Space, candidates, recorded_space

__all__ = ["DEFAULT_LIMIT", "Space", "candidates", "reason_class", "recorded_space", "sensible_block_ms"]
