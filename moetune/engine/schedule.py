"""In which order token counts are tuned, what each is expected to cost, and how many kernels a budget affords."""

from __future__ import annotations

from collections.abc import Sequence

from moetune.engine.backend import Ceilings
from moetune_kernels.shape import MoEShape

ANCHORS = 5  # counts whose winners' neighbours are compiled and raced; the others profit from what those found
CANDIDATE_RATIO = 2.0  # a raced candidate is about twice as slow as the bound allows
ANCHOR_COST = 2.0  # of another count's: an anchor races all that is compiled, and compiles neighbours on top
SAMPLE_US = 4_000.0  # beside the kernel itself: flush, launch, loading and Python, shared out over few samples
KERNELS_PER_BUDGET_S = 0.1  # per compile worker: a tenth of the budget goes to compiling, a second of CPU each
FEWEST_KERNELS, MOST_KERNELS = 48, 420  # both roles together
POLISH_SHARE = 0.25  # of the kernels: kept for the neighbours of the first winners


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


def cost_us(shape: MoEShape, tokens: int, ceilings: Ceilings) -> float:
    """Return the expected microseconds of one timed sample: a fixed part and the layer's own time."""
    rows = tokens * shape.top_k * shape.local_experts / (shape.experts or shape.local_experts)
    flops = 6.0 * rows * shape.hidden * shape.inter
    touched = min(float(shape.local_experts), rows)
    seconds = max(flops / ceilings.flops, touched * shape.expert_bytes / ceilings.bytes_per_s)
    return SAMPLE_US + CANDIDATE_RATIO * 1e6 * seconds


def affordable_kernels(budget_s: float | None, workers: int) -> int:
    """Return how many kernels a sweep may compile, both roles and the polish together.

    >>> affordable_kernels(240.0, 15)
    360
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
