"""Who wins the finals: by rule, so that noise neither dethrones the default nor picks at random among equals."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import hypot, log1p, sqrt

from moetune.engine.paired import gap
from moetune.outcome import Measured, Source
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.plan import LayerPlan

# Identical configs read 1-3% apart in windows that were not interleaved; interleaved rounds leave about half a percent.
NOISE = 0.005
COMPOSED_FLOOR = 0.03  # sums of cold kernels against a measured layer: launch gaps and a warm L2 are not in them
TIE_LIMIT = 0.01  # however wide the noise is, a plan 1% behind the best is no equal of it
# The median's standard error is 1.25 sigma / sqrt(n), and half the 20th to 80th percentile range is 0.84 sigma.
SPREAD_TO_ERROR = 1.49
CONFIDENCE = 3.0  # standard errors of the difference: 18 token counts times a few challengers leave room for luck

_SIMPLER = {Structure.GATHER: 0, Structure.TMA: 1, Structure.TMA_PERMUTE: 2}


@dataclass(frozen=True, slots=True)
class Finalist:
    """A plan with its end-to-end time."""

    plan: LayerPlan
    measured: Measured


def is_faster(one: Measured, other: Measured, noise: float = NOISE) -> bool:
    """Whether ``one`` is faster than ``other``, surely, and by more than ``noise``, a share of the time.

    Round by round where both were timed in the same rounds, else by their spreads.
    """
    found = gap(one.times_us, other.times_us)
    if found is not None:
        return found.high < 0 and found.median < -log1p(noise)
    return other.median_us - one.median_us > noise_us(one, other, noise)


def noise_us(one: Measured, other: Measured, noise: float = NOISE) -> float:
    """Return the difference in microseconds that these two measurements, taken apart, cannot tell from none."""
    floor = noise if one.source is other.source is not Source.COMPOSED else max(noise, COMPOSED_FLOOR)
    error_us = CONFIDENCE * hypot(_error_us(one), _error_us(other))
    return max(floor * min(one.median_us, other.median_us), error_us)


def ranking(
    finalists: Sequence[Finalist],
    default: Finalist | None,
    preferred: Collection[LayerPlan] = (),
    noise: float = NOISE,
) -> list[Finalist]:
    """Return all finalists, in the order in which they deserve the entry.

    First those that beat the default by more than noise, then the default, then the others. Equals of the best
    challenger are ordered by: winner of a neighbouring token count, simpler structure, less work in flight, text.
    """
    if default is None:
        return _with_ties_broken(sorted(finalists, key=_median_us), preferred, noise)
    others = [finalist for finalist in finalists if finalist.plan != default.plan]
    better = [finalist for finalist in others if is_faster(finalist.measured, default.measured, noise)]
    rest = [finalist for finalist in others if finalist not in better]
    return [
        *_with_ties_broken(sorted(better, key=_median_us), preferred, noise),
        default,
        *sorted(rest, key=_median_us),
    ]


def _with_ties_broken(ordered: Sequence[Finalist], preferred: Collection[LayerPlan], noise: float) -> list[Finalist]:
    if not ordered:
        return []
    best = ordered[0]
    tied = [finalist for finalist in ordered if _ties(finalist, best, noise)]
    tied.sort(key=lambda finalist: (finalist.plan not in preferred, *_plainness(finalist.plan)))
    return tied + [finalist for finalist in ordered if not _ties(finalist, best, noise)]


def _ties(finalist: Finalist, best: Finalist, noise: float) -> bool:
    behind_us = finalist.measured.median_us - best.measured.median_us
    limit_us = max(TIE_LIMIT, noise) * best.measured.median_us
    return behind_us <= limit_us and not is_faster(best.measured, finalist.measured, noise)


def _plainness(plan: LayerPlan) -> tuple[int, int, str]:
    """Order equals: pointer loads before descriptors, then the smaller tiles in flight, then the text."""
    configs = [plan.config(role) for role in Role]
    return sum(_SIMPLER[config.structure] for config in configs), sum(map(_in_flight, configs)), plan.text


def _in_flight(config: MoEKernelConfig) -> int:
    return (config.block_m + config.block_n) * config.block_k * config.prefetch_distance


def _median_us(finalist: Finalist) -> float:
    return finalist.measured.median_us


def _error_us(measured: Measured) -> float:
    return SPREAD_TO_ERROR * measured.spread_us / sqrt(max(measured.samples, 1))


def distrusted(measured: Measured) -> str | None:
    """Say why a strict sweep keeps no such time, or None when it does.

    A power cap is no reason: a large card under full load is always at it, in production too.
    """
    slowdowns = measured.clocks.slowdowns if measured.clocks is not None else ()
    return f"the GPU was held down while it was timed ({', '.join(slowdowns)})" if slowdowns else None
