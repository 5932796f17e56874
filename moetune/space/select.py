"""Which candidates are worth a compile: a few of every kind, the promising ones first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count as count_from
from itertools import islice
from operator import attrgetter
from typing import Any

from moetune.space.load import MANY_ROWS, ExpertLoad, sensible_block_ms
from moetune.space.occupancy import MOST_REGISTERS
from moetune.space.pool import Pool
from moetune.space.prior import Problem
from moetune_kernels.config import MoEKernelConfig, Role, Structure

# Shares of the limit. Low tiles are flat (many configs tie within 5% on an H200), high tiles are needles: of 576
# candidates at 4096 tokens one or two came within 2% of the best.
BLOCK_M_SHARE = {16: 1.4, 32: 0.7, 64: 1.3, 128: 1.5, 256: 0.5}
GATE_UP_256_SHARE = 0.1  # its two accumulators fill the registers: never within 12% of the best in three H200 sweeps
STRUCTURE_SHARE = {Structure.GATHER: 1.0, Structure.TMA: 1.0, Structure.TMA_PERMUTE: 0.7}
PERMUTE_MIN_BLOCK_M = 64  # copying the rows first only pays where there are many
# At 8192 to 16384 tokens the right group_m was worth up to 10% (gate-up of 128 experts: 16 before 8, 4 and 1), and each
# tile has another one.
GROUPED_SHARE = 0.17  # of the limit: the best tall tiles once more with other group_m
OTHER_GROUP_MS = (16, 4, 32)  # beside the one that tall tiles start with
# Of the limit: the most promising tiles once more with a register cap. 19 of the 108 kernels of three H200 tables carry
# one, and the polish found all of them, but only around the few winners that it had time for.
CAPPED_SHARE = 0.06
CAPS_FIRST = {1: 128, 2: 128, 4: 128, 8: 168, 16: 168}  # by warps: the cap that those kernels carry

# Low tiles: memory binds and the guess tells widths apart badly (16x64 won where it preferred 16x256), so each width
# has its turn.
LOW_BLOCK_M, SAME_WIDTH, NARROWEST = 32, 0.06, 16
AGAIN, AGAIN_LOW = 0.25, 0.5  # how much less a tile's other prefetch distances promise: the polish finds these

# Every choice but the cap: what a tile is told apart by, without making the config that has none.
tile_of = attrgetter(*(item.name for item in fields(MoEKernelConfig) if item.name != "max_registers"))

Group = tuple[Structure, int]
Cell = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Selector:
    """What a selection goes by beside the guess.

    Args:
        problem: which GEMM, on what.
        tokens: the token counts that the selection is for.
        allows: whether a config that was not enumerated may be tried.
        max_registers: the user's ceiling, which is then the cap of every tile that may have one.
    """

    problem: Problem
    tokens: Sequence[int]
    allows: Callable[[MoEKernelConfig], bool]
    max_registers: int | None = None


def select(configs: Sequence[MoEKernelConfig], selector: Selector, limit: int) -> tuple[MoEKernelConfig, ...]:
    """Return at most ``limit`` configs in the order to compile them: every prefix is a sensible mix.

    Each structure and tile height is a group with a share of the limit. Within a group the tiles come first that are
    promising at some token count, each with one prefetch distance; other distances of the same tile follow later. Then
    the best tiles with a register cap, and last of all the best tall tiles with other ``group_m``, where experts have
    many rows.
    """
    problem, tokens = selector.problem, selector.tokens
    plain, capped = _by_cap(configs, selector)
    pool = Pool(plain, problem)
    groups: dict[Group, Iterator[MoEKernelConfig]] = {}
    for key in sorted({_group(config) for config in plain}, key=lambda key: (key[1], key[0].value)):
        groups[key] = _by_promise(pool.where(lambda config, key=key: _group(config) == key), tokens)
    shares = {key: _share(key, problem.role) for key in groups}
    if limit >= len(configs):
        return (*_weighted_rounds(groups, shares, limit), *capped)
    regrouped = [] if limit >= len(plain) else _regrouped(pool, selector, int(GROUPED_SHARE * limit))
    room = limit - len(regrouped)
    again = _capped(pool, capped, selector, max(int(CAPPED_SHARE * limit), room - len(plain)))
    return tuple(dict.fromkeys([*_weighted_rounds(groups, shares, room - len(again)), *again, *regrouped]))


def _by_cap(
    configs: Sequence[MoEKernelConfig], selector: Selector
) -> tuple[list[MoEKernelConfig], list[MoEKernelConfig]]:
    """Return each tile once, without a cap where it may go without one, and the same tiles with the caps that are left."""
    tiles: dict[tuple[Any, ...], list[MoEKernelConfig]] = {}
    for config in configs:
        tiles.setdefault(tile_of(config), []).append(config)
    plain: list[MoEKernelConfig] = []
    capped: list[MoEKernelConfig] = []
    for members in tiles.values():
        first, *others = sorted(members, key=lambda config: _cap_order(config, selector))
        plain.append(first)
        capped += others
    return plain, capped


def _cap_order(config: MoEKernelConfig, selector: Selector) -> tuple[bool, bool, int]:
    """Order a tile's caps: none, then the usual one, then the highest; under the user's ceiling that one first, none last.

    With the ceiling as its cap a kernel keeps to it for certain. Without one half of all kernels take over 64 registers
    beside their accumulators, a tenth of them over 110, and a compile that proves to be outside is a compile lost.
    """
    cap, ceiling = config.max_registers, selector.max_registers
    height = MOST_REGISTERS if cap is None else cap
    if ceiling is not None:
        return cap is None, cap != ceiling, -height
    return cap is not None, cap != CAPS_FIRST[config.num_warps], -height


def _capped(plain: Pool, capped: Sequence[MoEKernelConfig], selector: Selector, limit: int) -> list[MoEKernelConfig]:
    """Return at most ``limit`` tiles with a cap: the best tile of each kind with its usual cap, then the second best...

    Ranked without the cap, since the guess knows a cap for the room that it makes, which is not what caps were seen to do.
    """
    promise = {tile_of(config): found for config, found in _promises(_bare(plain), selector.tokens).items()}
    waiting: dict[tuple[Any, ...], list[MoEKernelConfig]] = {}
    for config in capped:
        waiting.setdefault(tile_of(config), []).append(config)
    places: Counter[Group] = Counter()
    ranked: list[tuple[int, float, MoEKernelConfig]] = []
    for tile in sorted(waiting, key=lambda tile: promise[tile]):
        group = _group(waiting[tile][0])
        for turn, config in enumerate(sorted(waiting[tile], key=lambda config: _cap_order(config, selector))):
            ranked.append((places[group] + turn * len(waiting), promise[tile], config))
        places[group] += 1
    ranked.sort(key=lambda item: item[:2])
    return [config for _, _, config in ranked[:limit]]


def _bare(pool: Pool) -> Pool:
    """Return the pool with every config's cap left away."""
    if all(config.max_registers is None for config in pool.configs):
        return pool
    return Pool([replace(config, max_registers=None) for config in pool.configs], pool.problem)


def _group(config: MoEKernelConfig) -> Group:
    return config.structure, config.block_m


def _share(group: Group, role: Role) -> float:
    structure, block_m = group
    if block_m == 256 and role is Role.GATE_UP:
        return GATE_UP_256_SHARE
    if structure is Structure.TMA_PERMUTE and block_m < PERMUTE_MIN_BLOCK_M:
        return 0.1
    return STRUCTURE_SHARE[structure] * BLOCK_M_SHARE[block_m]


def _by_promise(pool: Pool, tokens: Sequence[int]) -> Iterator[MoEKernelConfig]:
    """Yield configs best first; a tile's second prefetch distance waits until every promising tile had its first."""
    promise = _promises(pool, tokens)
    configs = pool.configs
    cells: dict[Cell, list[MoEKernelConfig]] = {}
    for config in sorted(configs, key=lambda config: promise[config]):
        cells.setdefault((config.block_n, config.block_k, config.num_warps), []).append(config)
    is_low = configs[0].block_m <= LOW_BLOCK_M
    widths: Counter[int] = Counter({NARROWEST: 4})
    ranked: list[tuple[float, int, MoEKernelConfig]] = []
    for order, members in enumerate(cells.values()):
        width = members[0].block_n
        waits = 1.0 + SAME_WIDTH * widths[width] if is_low else 1.0
        widths[width] += 1
        again = AGAIN_LOW if is_low else AGAIN
        ranked += [
            (promise[config] * waits * (1.0 + again * place), order, config) for place, config in enumerate(members)
        ]
    ranked.sort(key=lambda item: item[:2])
    yield from (config for _, _, config in ranked)


def promises(
    configs: Iterable[MoEKernelConfig], problem: Problem, tokens: Sequence[int]
) -> dict[MoEKernelConfig, float]:
    """Return each config's guessed time over the best guess at that token count, at the count that suits it most."""
    return _promises(Pool([*configs], problem), tokens)


def _promises(pool: Pool, tokens: Sequence[int]) -> dict[MoEKernelConfig, float]:
    problem = pool.problem
    best: dict[MoEKernelConfig, float] = dict.fromkeys(pool.configs, float("inf"))
    for tokens_asked in _distinct_loads(problem, tokens):
        sensible = set(sensible_block_ms(problem.shape, tokens_asked))
        guesses = [
            (config, guess)
            for config, guess in zip(pool.configs, pool.times(tokens_asked), strict=True)
            if config.block_m in sensible
        ]
        fastest = min((guess for _, guess in guesses), default=1.0)
        for config, guess in guesses:
            best[config] = min(best[config], guess / fastest)
    return best


def _distinct_loads(problem: Problem, tokens: Sequence[int]) -> list[int]:
    """Return at most six of the token counts, spread over the rows per expert: neighbours would only repeat them."""
    ordered = sorted(set(tokens), key=lambda count: ExpertLoad.of(problem.shape, count).rows)
    if len(ordered) <= 6:
        return ordered
    return [ordered[round(place * (len(ordered) - 1) / 5)] for place in range(6)]


def _regrouped(pool: Pool, selector: Selector, limit: int) -> list[MoEKernelConfig]:
    """Return at most ``limit`` of the best tall tiles with another ``group_m``: each kind's best, then its second..."""
    problem, most = selector.problem, max(selector.tokens)
    if ExpertLoad.of(problem.shape, most).rows <= MANY_ROWS:
        return []
    sensible = set(sensible_block_ms(problem.shape, most))
    kinds: dict[Group, list[MoEKernelConfig]] = {}
    configs = pool.configs
    guesses = dict(zip(configs, pool.times(most), strict=True))
    for config in sorted(configs, key=lambda config: guesses[config]):
        worthy = config.block_m in sensible and _share(_group(config), problem.role) > GATE_UP_256_SHARE
        if worthy and config.group_m not in (1, *OTHER_GROUP_MS):
            kinds.setdefault(_group(config), []).append(config)
    order = sorted(
        (
            (place, guesses[config], config)
            for members in kinds.values()
            for place, config in enumerate(members[:limit])
        ),
        key=lambda item: item[:2],
    )
    variants = (replace(config, group_m=group_m) for _, _, config in order for group_m in OTHER_GROUP_MS)
    known = set(configs)
    return list(islice((config for config in variants if config not in known and selector.allows(config)), limit))


def _weighted_rounds(
    groups: dict[Group, Iterator[MoEKernelConfig]], shares: dict[Group, float], limit: int
) -> Iterator[MoEKernelConfig]:
    """Yield from the groups so that each has had its share at any moment; an empty group leaves the rest to others."""
    given = dict.fromkeys(groups, 0)
    for _ in count_from():
        if not groups or sum(given.values()) >= limit:
            return
        group = min(groups, key=lambda key: (given[key] + 1) / shares[key])
        config = next(groups[group], None)
        if config is None:
            del groups[group]
            continue
        given[group] += 1
        yield config
