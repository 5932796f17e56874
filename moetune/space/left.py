"""Whether a user's limits leave anything to try, said before anything is compiled; and what there is to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moetune.errors import UsageError
from moetune.space.load import sensible_block_ms
from moetune.space.select import tile_of
from moetune.space.space import Space
from moetune_kernels.config import MoEKernelConfig, Role

MOST_COUNTS = 6  # token counts that a sentence names


def require_something(spaces: Mapping[Role, Space], tokens: Sequence[int]) -> None:
    """Refuse limits that leave a GEMM, or both GEMMs together at some token count, without a config.

    Raises:
        UsageError: saying which limit removed how many.
    """
    if not any(space.limits.any for space in spaces.values()):
        return
    for role, space in spaces.items():
        if not space.legal:
            raise UsageError(f"no config is left for {role.value}: {removed_text(space)}; widen the limits")
    bare = [count for count in tokens if not shared_heights(spaces, count)]
    if bare:
        named = counts_text(bare)
        sensible = ", ".join(map(str, sensible_block_ms(spaces[Role.DOWN].shape, bare[0])))
        raise UsageError(
            f"no config is left at {named} tokens: both GEMMs need one block_m out of {sensible} at {bare[0]}, and "
            f"{' and '.join(_heights(space) for space in spaces.values())}; "
            f"{'; '.join(f'{role.value}: {removed_text(space)}' for role, space in spaces.items())}; "
            "widen the limits, or leave these counts out of --tokens"
        )


def shared_heights(spaces: Mapping[Role, Space], tokens: int) -> set[int]:
    """Return the tile heights that are left to both GEMMs at ``tokens``."""
    shared = set(sensible_block_ms(spaces[Role.DOWN].shape, tokens))
    for space in spaces.values():
        shared &= space.block_ms(tokens)
    return shared


def telling(space: Space) -> list[MoEKernelConfig]:
    """Return the configs whose compiles together show whether any keeps the limits, those that take least of them first.

    Of a tile these are the one without a cap and the one under the user's own: with another cap it takes as much shared
    memory, and spills more than under that one. Where neither may be tried it is the one with the highest cap.
    """
    tiles: dict[tuple[Any, ...], list[MoEKernelConfig]] = {}
    for config in dict.fromkeys((*space.configs, *space.firsts.values())):
        tiles.setdefault(tile_of(config), []).append(config)
    own = space.limits.max_registers
    found: list[MoEKernelConfig] = []
    for members in tiles.values():
        first = [config for config in members if config.max_registers in (None, own)]
        found += first or [max(members, key=lambda config: config.max_registers or 0)]
    return sorted(found, key=lambda config: space.limits.share_taken(config, space.role, space.shape, space.device))


def counts_text(tokens: Sequence[int]) -> str:
    """Return the first token counts, as a sentence names them.

    >>> counts_text([1, 2, 4, 8, 16, 24, 32])
    '1, 2, 4, 8, 16, 24, …'
    """
    return ", ".join(map(str, tokens[:MOST_COUNTS])) + (", …" if len(tokens) > MOST_COUNTS else "")


def removed_text(space: Space) -> str:
    """Return which limit removed how many configs that can run.

    A config that two limits remove is counted at the first.
    """
    if not space.outside:
        return f"none of {sum(space.removed.values()):,} can run" if not space.legal else "no limit removed any"
    return ", ".join(f"{limit}: {count:,} removed" for limit, count in space.outside.most_common())


def _heights(space: Space) -> str:
    return f"{space.role.value} keeps {', '.join(map(str, sorted(space.heights))) or 'none'}"
