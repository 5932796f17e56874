"""In which order token counts are tuned, how many kernels a budget affords, and which counts get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

ANCHORS = 5  # the first counts, spread over the ladder; the others profit from what those found
KERNELS_PER_BUDGET_S = 0.2  # per compile worker: a fifth of the budget goes to compiling, a second of CPU each
FEWEST_KERNELS, MOST_KERNELS = 48, 210  # both roles together; searches leave some of them
POLISH_SHARE = 0.7  # of the kernels: kept for what the trials of token counts ask for
# These by rows per expert: few rows are flat (a dozen configs within 2%), from here on tiles are needles. The anchors
# among them pass on what they find.
NEEDLE_ROWS = 48
NEEDLE_WEIGHT, NEEDLE_ANCHOR_WEIGHT, FLAT_WEIGHT, FLAT_ANCHOR_WEIGHT = 2, 5, 0, 4
FEWEST_POLISH = 4  # kernels of one race: fewer are not worth a round of the compile pool
ANCHOR_TRIALS, TRIALS = 32, 16  # of one role; searches stop earlier where nothing promises a gain


@dataclass(frozen=True, slots=True)
class Quota:
    """What the plan of a sweep has for one race: trials, and how many of them may need a compile."""

    trials: int
    kernels: int


def anchors(tokens: Sequence[int]) -> list[int]:
    """Return up to five token counts spread over the ladder, its ends included.

    >>> anchors([1, 2, 4, 8, 16, 32, 64, 128, 256])
    [1, 4, 16, 64, 256]
    """
    ladder = sorted(set(tokens))
    if len(ladder) <= ANCHORS:
        return ladder
    return [ladder[round(place * (len(ladder) - 1) / (ANCHORS - 1))] for place in range(ANCHORS)]


def order(tokens: Sequence[int]) -> list[int]:
    """Return the anchors first, then the rest, each ascending: a sweep cut short still spans the ladder."""
    first = anchors(tokens)
    return first + [count for count in sorted(set(tokens)) if count not in first]


def quotas(rows: Mapping[int, float], kernels: int) -> dict[int, Quota]:
    """Return what each race of a token count has, one role's share.

    Args:
        rows: mean rows per expert of each token count of the ladder.
        kernels: to compile after the first round for all counts together, one role.
    """
    first, polish = set(anchors(list(rows))), polish_by_count(rows, kernels)
    return {
        tokens: Quota(trials=ANCHOR_TRIALS if tokens in first else TRIALS, kernels=polish[tokens]) for tokens in rows
    }


def carried_over(plan: Mapping[int, Quota], tokens: int, spent: int) -> Quota:
    """Return the quota at ``tokens`` with the kernels that earlier races of the plan left, where it has any.

    Args:
        plan: the quota of every token count, one role's share.
        tokens: the count whose turn it is.
        spent: kernels that races of this role asked for so far.

    >>> plan = {1: Quota(8, 4), 64: Quota(8, 4), 4096: Quota(8, 4)}
    >>> carried_over(plan, 4096, spent=5)
    Quota(trials=8, kernels=7)
    """
    quota, counts = plan[tokens], order(list(plan))
    earlier = sum(plan[count].kernels for count in counts[: counts.index(tokens)])
    kernels = quota.kernels + earlier - spent if quota.kernels else 0
    return replace(quota, kernels=max(min(kernels, quota.trials), 0))


def polish_by_count(rows: Mapping[int, float], kernels: int) -> dict[int, int]:
    """Return how many kernels each race of a token count may compile, one role's share.

    Args:
        rows: mean rows per expert of each token count of the ladder.
        kernels: for all counts together, one role.

    >>> polish_by_count({1: 1.0, 64: 16.0, 1024: 256.0}, 48)
    {1: 14, 64: 14, 1024: 18}
    """
    first = anchors(list(rows))
    weights = {tokens: FLAT_WEIGHT if rows[tokens] < NEEDLE_ROWS else NEEDLE_WEIGHT for tokens in rows}
    weights |= {tokens: FLAT_ANCHOR_WEIGHT if rows[tokens] < NEEDLE_ROWS else NEEDLE_ANCHOR_WEIGHT for tokens in first}
    wanted = sorted((tokens for tokens in rows if weights[tokens]), key=lambda tokens: (-weights[tokens], -tokens))
    while wanted and kernels * weights[wanted[-1]] < FEWEST_POLISH * sum(weights[tokens] for tokens in wanted):
        wanted.pop()
    total = sum(weights[tokens] for tokens in wanted)
    return {tokens: kernels * weights[tokens] // total if tokens in wanted else 0 for tokens in rows}


def affordable_kernels(budget_s: float | None, workers: int) -> int:
    """Return how many kernels a sweep may compile, both roles and the polish together.

    >>> affordable_kernels(40.0, 15)
    120
    """
    if budget_s is None:
        return MOST_KERNELS
    return int(min(max(KERNELS_PER_BUDGET_S * budget_s * workers, FEWEST_KERNELS), MOST_KERNELS))


def nearest(done: Sequence[int], tokens: int, reach: float) -> list[int]:
    """Return the nearest finished token count below and above, if within ``reach`` times.

    >>> nearest([1, 16, 64], 32, reach=8)
    [16, 64]
    """
    below = [count for count in done if count < tokens <= reach * count]
    above = [count for count in done if count > tokens and count <= reach * tokens]
    return ([max(below)] if below else []) + ([min(above)] if above else [])
