"""Which candidates are worth a compile: a few of every kind, the promising ones first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count as count_from
from itertools import islice

from moetune.space.load import MANY_ROWS, ExpertLoad, sensible_block_ms
from moetune.space.prior import Problem, predict
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

# Low tiles: memory binds and the guess tells widths apart badly (16x64 won where it preferred 16x256), so each width
# has its turn.
LOW_BLOCK_M, SAME_WIDTH, NARROWEST = 32, 0.06, 16
AGAIN, AGAIN_LOW = 0.25, 0.5  # how much less a tile's other prefetch distances promise: the polish finds these

Group = tuple[Structure, int]
Cell = tuple[int, int, int]


def select(
    configs: Sequence[MoEKernelConfig], problem: Problem, tokens: Sequence[int], limit: int
) -> tuple[MoEKernelConfig, ...]:
    """Return at most ``limit`` configs in the order to compile them: every prefix is a sensible mix.

    Each structure and tile height is a group with a share of the limit. Within a group the tiles come first that are
    promising at some token count, each with one prefetch distance; other distances of the same tile follow later. The
    last of all are the best tall tiles with other ``group_m``, where experts have many rows.
    """
    groups: dict[Group, Iterator[MoEKernelConfig]] = {}
    for key in sorted({_group(config) for config in configs}, key=lambda key: (key[1], key[0].value)):
        members = [config for config in configs if _group(config) == key]
        groups[key] = _by_promise(members, problem, tokens)
    shares = {key: _share(key, problem.role) for key in groups}
    grouped = _regrouped(configs, problem, tokens, int(GROUPED_SHARE * limit)) if limit < len(configs) else []
    return (*_weighted_rounds(groups, shares, limit - len(grouped)), *grouped)


def _group(config: MoEKernelConfig) -> Group:
    return config.structure, config.block_m


def _share(group: Group, role: Role) -> float:
    structure, block_m = group
    if block_m == 256 and role is Role.GATE_UP:
        return GATE_UP_256_SHARE
    if structure is Structure.TMA_PERMUTE and block_m < PERMUTE_MIN_BLOCK_M:
        return 0.1
    return STRUCTURE_SHARE[structure] * BLOCK_M_SHARE[block_m]


def _by_promise(
    configs: Sequence[MoEKernelConfig], problem: Problem, tokens: Sequence[int]
) -> Iterator[MoEKernelConfig]:
    """Yield configs best first; a tile's second prefetch distance waits until every promising tile had its first."""
    promise = promises(configs, problem, tokens)
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
    pool = list(configs)
    best: dict[MoEKernelConfig, float] = dict.fromkeys(pool, float("inf"))
    for tokens_asked in _distinct_loads(problem, tokens):
        sensible = set(sensible_block_ms(problem.shape, tokens_asked))
        guesses = {config: predict(config, problem, tokens_asked) for config in pool if config.block_m in sensible}
        fastest = min(guesses.values(), default=1.0)
        for config, guess in guesses.items():
            best[config] = min(best[config], guess / fastest)
    return best


def _distinct_loads(problem: Problem, tokens: Sequence[int]) -> list[int]:
    """Return at most six of the token counts, spread over the rows per expert: neighbours would only repeat them."""
    ordered = sorted(set(tokens), key=lambda count: ExpertLoad.of(problem.shape, count).rows)
    if len(ordered) <= 6:
        return ordered
    return [ordered[round(place * (len(ordered) - 1) / 5)] for place in range(6)]


def _regrouped(
    configs: Sequence[MoEKernelConfig], problem: Problem, tokens: Sequence[int], limit: int
) -> list[MoEKernelConfig]:
    """Return at most ``limit`` of the best tall tiles with another ``group_m``: each kind's best, then its second..."""
    most = max(tokens)
    if ExpertLoad.of(problem.shape, most).rows <= MANY_ROWS:
        return []
    sensible = set(sensible_block_ms(problem.shape, most))
    kinds: dict[Group, list[MoEKernelConfig]] = {}
    for config in sorted(configs, key=lambda config: predict(config, problem, most)):
        worthy = config.block_m in sensible and _share(_group(config), problem.role) > GATE_UP_256_SHARE
        if worthy and config.group_m not in (1, *OTHER_GROUP_MS):
            kinds.setdefault(_group(config), []).append(config)
    order = sorted(
        (
            (place, predict(config, problem, most), config)
            for members in kinds.values()
            for place, config in enumerate(members[:limit])
        ),
        key=lambda item: item[:2],
    )
    variants = (replace(config, group_m=group_m) for _, _, config in order for group_m in OTHER_GROUP_MS)
    return list(islice(variants, limit))


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
