"""From the finishers of two races to a few whole-layer plans worth an end-to-end measurement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moetune.engine.race import Standing
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.plan import LayerPlan

PER_ROLE = 4  # finishers of each role and block_m that are paired
PER_BLOCK_M = 5  # plans of one block_m among the finalists, so that a second block_m is heard as well
PER_CONFIG = 2  # plans with one kernel among them: sums err by a few percent, so a kernel must not fill the finals
FINALISTS = 8


@dataclass(frozen=True, slots=True)
class Composed:
    """A plan and the sum of its parts' times."""

    plan: LayerPlan
    sum_us: float


def compose(
    gate_up: Sequence[Standing], down: Sequence[Standing], routing_us: Mapping[int, float], finalists: int = FINALISTS
) -> list[Composed]:
    """Return at most ``finalists``, the fastest sum first: pairs under one ``block_m`` that routing can serve."""
    pairs: list[Composed] = []
    for block_m, fixed_us in routing_us.items():
        pairs += _pairs(_of(gate_up, block_m), _of(down, block_m), fixed_us)
    pairs.sort(key=lambda composed: composed.sum_us)
    return _varied(pairs)[:finalists]


def block_ms(gate_up: Iterable[Standing], down: Iterable[Standing]) -> list[int]:
    """Return the tile heights that both roles finished with."""
    shared = {standing.config.block_m for standing in gate_up} & {standing.config.block_m for standing in down}
    return sorted(shared)


def _of(standings: Sequence[Standing], block_m: int) -> list[Standing]:
    return [standing for standing in standings if standing.config.block_m == block_m][:PER_ROLE]


def _pairs(gate_up: Sequence[Standing], down: Sequence[Standing], fixed_us: float) -> list[Composed]:
    return [
        Composed(_plan(first.config, second.config), first.measured.median_us + second.measured.median_us + fixed_us)
        for first in gate_up
        for second in down
    ]


def _plan(gate_up: MoEKernelConfig, down: MoEKernelConfig) -> LayerPlan:
    return LayerPlan(gate_up=gate_up, down=down)


def _varied(pairs: Sequence[Composed]) -> list[Composed]:
    """Take the fastest, at most a few of each block_m and of each kernel while another one is waiting."""
    counts: Counter[object] = Counter()
    first: list[Composed] = []
    later: list[Composed] = []
    for composed in pairs:
        plan = composed.plan
        kernels = (Role.GATE_UP, plan.gate_up), (Role.DOWN, plan.down)
        if counts[plan.block_m] < PER_BLOCK_M and all(counts[kernel] < PER_CONFIG for kernel in kernels):
            counts.update((plan.block_m, *kernels))
            first.append(composed)
        else:
            later.append(composed)
    return first + later
