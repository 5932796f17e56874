"""A model of what the prior gets wrong: a Gaussian process over configs and token counts.

It is fitted to log time over guess. A config's distance is a sum over its axes, so that the kernel is a product over
them and axes interact; a count's distance is in powers of two. A rough and a smooth part let near configs differ while
far ones still agree on what a tile height costs. Each token count has a level of its own, so the unit of the guess does
not matter. The constants are rounded from the likelihood of two recorded H200 layers each, checked on the third
(docs/decisions/0012-search.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2

import numpy as np
import numpy.typing as npt

from moetune_kernels.config import BLOCK_SIZES, MAX_PREFETCH, WARP_COUNTS, MoEKernelConfig, Structure

Array = npt.NDArray[np.float64]

# Distance per step of an axis (a doubling, or one stage), and between any two structures or register caps.
STEP = {"block_m": 0.45, "block_n": 0.2, "block_k": 0.35, "num_warps": 0.06, "prefetch_distance": 0.12, "group_m": 0.05}
LEVELS = {
    "block_m": BLOCK_SIZES,
    "block_n": BLOCK_SIZES,
    "block_k": BLOCK_SIZES,
    "num_warps": WARP_COUNTS,
    "prefetch_distance": tuple(range(1, MAX_PREFETCH + 1)),
    "group_m": (1, 2, 4, 8, 16, 32, 64),
}
OTHER_STRUCTURE, OTHER_CAP = 0.15, 0.1
CAPS = (None, 128, 168)
WIDTH = sum(len(levels) - 1 for levels in LEVELS.values()) + len(Structure) + len(CAPS)  # of a config's code
# Of log time: how far the smooth and the rough part go, and how much faster the rough one forgets.
SMOOTH, ROUGH, ROUGHER = 0.11, 0.09, 2.7
SMOOTH_DOUBLING, ROUGH_DOUBLING = 0.14, 0.3  # distance of a token count from its double
LEVEL = 1.0  # of a token count
NOISE = 0.012  # a few samples of a kernel


@dataclass(frozen=True, slots=True)
class Sighting:
    """One trial as the model sees it: log of its time over the guess."""

    config: MoEKernelConfig
    tokens: int
    error: float


class Surrogate:
    """The posterior after some sightings; without any, the prior.

    A sweep tries the same configs at many counts, and the covariance is a product over both: what depends on the
    configs is computed once per distinct config, what depends on the counts once per distinct count.
    """

    def __init__(self, sightings: Sequence[Sighting]) -> None:
        configs = {sighting.config: None for sighting in sightings}
        counts = {sighting.tokens: None for sighting in sightings}
        config_places = {config: place for place, config in enumerate(configs)}
        count_places = {tokens: place for place, tokens in enumerate(counts)}
        self._codes = encoded([*configs])
        self._counts = np.array([log2(tokens) for tokens in counts])
        self._config_of = np.array([config_places[sighting.config] for sighting in sightings], dtype=np.intp)
        self._count_of = np.array([count_places[sighting.tokens] for sighting in sightings], dtype=np.intp)
        errors = np.array([sighting.error for sighting in sightings])
        self._mean = float(errors.mean()) if sightings else 0.0
        by_config = _by_config(self._codes, self._codes)
        by_count = _by_count(self._counts[:, None], self._counts[None, :])
        self._covariance = _product(
            [one.take(self._config_of, 0).take(self._config_of, 1) for one in by_config],
            [one.take(self._count_of, 0).take(self._count_of, 1) for one in by_count],
        )
        self._covariance.flat[:: len(errors) + 1] += NOISE**2
        self._weights = np.linalg.solve(self._covariance, errors - self._mean)

    def errors(self, configs: Sequence[MoEKernelConfig], tokens: int) -> Array:
        """Return the expected log of time over guess of each config."""
        level, smooth, rough = (one[self._count_of] * self._weights for one in self._to_count(tokens))
        near, nearer = _by_config(encoded(configs), self._codes)
        total = np.full(len(configs), self._mean + level.sum())
        for part, weights in ((near, smooth), (nearer, rough)):
            total += part @ np.bincount(self._config_of, weights, len(self._codes))
        return total

    def spread(self, configs: Sequence[MoEKernelConfig], tokens: int) -> Array:
        """Return the covariance of the errors of ``configs`` at one token count; a level never seen is left out."""
        codes = encoded(configs)
        here = np.array(log2(tokens))
        cross = _product(
            [one.take(self._config_of, 1) for one in _by_config(codes, self._codes)],
            [one[self._count_of] for one in self._to_count(tokens)],
        )
        unseen = 0.0 if (self._counts == log2(tokens)).any() else LEVEL**2
        prior = _product(_by_config(codes, codes), _by_count(here, here))
        return prior - cross @ np.linalg.solve(self._covariance, cross.T) - unseen

    def _to_count(self, tokens: int) -> tuple[Array, Array, Array]:
        return _by_count(self._counts, np.array(log2(tokens)))


def _by_config(codes: Array, others: Array) -> tuple[Array, Array]:
    """Return what the configs make of the smooth and of the rough part, every one of ``codes`` with all ``others``."""
    distance = (codes**2).sum(1)[:, None] + (others**2).sum(1)[None, :]
    distance -= 2.0 * codes @ others.T
    np.maximum(distance, 0.0, out=distance)
    nearer = -ROUGHER * distance
    np.negative(distance, out=distance)
    return np.exp(distance, out=distance), np.exp(nearer, out=nearer)


def _by_count(tokens: Array, others: Array) -> tuple[Array, Array, Array]:
    """Return the level, and what the token counts make of the smooth and of the rough part; logs to the base 2."""
    doublings = np.abs(tokens - others)
    return (
        np.where(doublings < 1e-9, LEVEL**2, 0.0),
        SMOOTH**2 * np.exp(-SMOOTH_DOUBLING * doublings),
        ROUGH**2 * np.exp(-ROUGH_DOUBLING * doublings),
    )


def _product(by_config: Sequence[Array], by_count: Sequence[Array]) -> Array:
    """Return the prior covariance, in the memory of ``by_config``: new arrays cost more than what is done with them."""
    (near, nearer), (level, smooth, rough) = by_config, by_count
    near *= smooth
    near += level
    nearer *= rough
    near += nearer
    return near


def encoded(configs: Sequence[MoEKernelConfig]) -> Array:
    """Return a row per config whose squared distances are the configs' distances."""
    return np.frombuffer(b"".join(map(_code, configs)), dtype=np.float64).reshape(len(configs), WIDTH)


@lru_cache(maxsize=1 << 15)
def _code(config: MoEKernelConfig) -> bytes:
    """Return the row of one config as the bytes of its numbers: joined faster than any list becomes an array."""
    code: list[float] = []
    for name, levels in LEVELS.items():
        value, step = getattr(config, name), STEP[name] ** 0.5
        code += [step if value >= level else 0.0 for level in levels[1:]]
    code += [(OTHER_STRUCTURE / 2) ** 0.5 * (config.structure is structure) for structure in Structure]
    code += [(OTHER_CAP / 2) ** 0.5 * (config.max_registers == cap) for cap in CAPS]
    return np.array(code, dtype=np.float64).tobytes()
