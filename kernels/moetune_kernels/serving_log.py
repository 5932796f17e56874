"""What MOETUNE_DEBUG=1 says while serving: once per shape and entry, which table and plan answer, and why."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import TYPE_CHECKING

from moetune_kernels.config import MoEKernelConfig
from moetune_kernels.shape import MoEShape

if TYPE_CHECKING:
    from moetune_kernels.lookup import Resolved

LOGGER = logging.getLogger("moetune")
_MAX_REMEMBERED = 4096
_said: set[object] = set()


@cache
def is_debugging() -> bool:
    """Whether MOETUNE_DEBUG asks for the log; read once. The first yes sends the logger ``moetune`` to stderr."""
    if os.environ.get("MOETUNE_DEBUG", "0") in ("", "0"):
        return False
    LOGGER.setLevel(logging.DEBUG)
    if not LOGGER.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("moetune: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False  # else a root handler would print each line again
    return True


def log_once(resolved: Resolved, shape: MoEShape, tokens: int) -> None:
    """Log which table and plan serve ``tokens`` of ``shape`` and why, once per shape and entry (or default plan)."""
    if not is_debugging():
        return
    served_by = resolved.plan if resolved.path is None else (resolved.path, resolved.entry_tokens)
    if is_first_time((shape, served_by)):
        LOGGER.info(
            "%s at %d tokens: %s; gate_up %s; down %s", shape.key, tokens, resolved.why,
            config_text(resolved.plan.gate_up), config_text(resolved.plan.down),
        )  # fmt: skip


def warn_once(text: str) -> None:
    """Warn on the logger ``moetune``, once per text. Not by ``warnings``: under ``-W error`` that would stop a forward."""
    if is_first_time(text):
        LOGGER.warning(text)


def is_first_time(key: object) -> bool:
    """Say whether ``key`` is new; what is remembered is bounded, so a very long life may repeat itself."""
    if key in _said:
        return False
    if len(_said) >= _MAX_REMEMBERED:
        _said.clear()
    _said.add(key)
    return True


def config_text(config: MoEKernelConfig) -> str:
    """Return a config in one line: ``gather 16x64x128, 4 warps, prefetch 4, group_m 1``."""
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
    extra = "" if config.max_registers is None else f", at most {config.max_registers} registers"
    return (
        f"{config.structure.value} {tile}, {config.num_warps} warps, prefetch {config.prefetch_distance}, "
        f"group_m {config.group_m}{extra}"
    )


def forget() -> None:
    """Forget what was said and whether debugging is on, so that both are decided anew."""
    _said.clear()
    is_debugging.cache_clear()
