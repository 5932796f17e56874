"""In which order token counts are tuned, how many kernels a budget affords, and which counts get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ANCHORS = 5  # the first counts, spread over the ladder; the others profit from what those found
KERNELS_PER_BUDGET_S = 0.115  # per compile worker: an eighth of the budget goes to compiling, a second of CPU each
FEWEST_KERNELS, MOST_KERNELS = 48, 420  # both roles together
POLISH_SHARE = 0.35  # of the kernels: kept for the neighbours of winners
# Polish by rows per expert: few rows are flat (a dozen configs within 2%), from here on tiles are needles. The anchors
# among them pass on what they find.
NEEDLE_ROWS = 48
NEEDLE_WEIGHT, NEEDLE_ANCHOR_WEIGHT, FLAT_WEIGHT, FLAT_ANCHOR_WEIGHT = 2, 5, 0, 2
FEWEST_POLISH = 4  # neighbours of one race: fewer are not worth a round of the compile pool


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


def polish_by_count(rows: Mapping[int, float], kernels: int) -> dict[int, int]:
    """Return how many neighbours of winners each race of a token count may compile, one role's share.

    Args:
        rows: mean rows per expert of each token count of the ladder.
        kernels: for all counts together, one role.

    >>> polish_by_count({1: 1.0, 64: 16.0, 1024: 256.0}, 48)
    {1: 10, 64: 10, 1024: 26}
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

    >>> affordable_kernels(240.0, 15)
    414
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
