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
    """The posterior after some sightings; without any, the prior."""

    def __init__(self, sightings: Sequence[Sighting]) -> None:
        self._codes = encoded([sighting.config for sighting in sightings])
        self._tokens = np.array([log2(sighting.tokens) for sighting in sightings])
        errors = np.array([sighting.error for sighting in sightings])
        self._mean = float(errors.mean()) if sightings else 0.0
        covariance = self._prior(self._codes, self._tokens, self._codes, self._tokens)
        self._covariance = covariance + NOISE**2 * np.eye(len(errors))
        self._weights = np.linalg.solve(self._covariance, errors - self._mean)

    def errors(self, configs: Sequence[MoEKernelConfig], tokens: int) -> Array:
        """Return the expected log of time over guess of each config."""
        return self._mean + self._cross(configs, tokens) @ self._weights

    def spread(self, configs: Sequence[MoEKernelConfig], tokens: int) -> Array:
        """Return the covariance of the errors of ``configs`` at one token count; a level never seen is left out."""
        codes, counts = encoded(configs), np.full(len(configs), log2(tokens))
        cross = self._cross(configs, tokens)
        unseen = 0.0 if (self._tokens == log2(tokens)).any() else LEVEL**2
        return self._prior(codes, counts, codes, counts) - cross @ np.linalg.solve(self._covariance, cross.T) - unseen

    def _cross(self, configs: Sequence[MoEKernelConfig], tokens: int) -> Array:
        return self._prior(encoded(configs), np.full(len(configs), log2(tokens)), self._codes, self._tokens)

    @staticmethod
    def _prior(codes: Array, tokens: Array, others: Array, other_tokens: Array) -> Array:
        squares = (codes**2).sum(1)[:, None] + (others**2).sum(1)[None, :]
        distance = np.maximum(squares - 2.0 * codes @ others.T, 0.0)
        doublings = np.abs(tokens[:, None] - other_tokens[None, :])
        smooth = SMOOTH**2 * np.exp(-distance - SMOOTH_DOUBLING * doublings)
        rough = ROUGH**2 * np.exp(-ROUGHER * distance - ROUGH_DOUBLING * doublings)
        return LEVEL**2 * (doublings < 1e-9) + smooth + rough


def encoded(configs: Sequence[MoEKernelConfig]) -> Array:
    """Return a row per config whose squared distances are the configs' distances."""
    return np.array([_code(config) for config in configs], dtype=np.float64).reshape(len(configs), WIDTH)


@lru_cache(maxsize=1 << 15)
def _code(config: MoEKernelConfig) -> tuple[float, ...]:
    code: list[float] = []
    for name, levels in LEVELS.items():
        value, step = getattr(config, name), STEP[name] ** 0.5
        code += [step if value >= level else 0.0 for level in levels[1:]]
    code += [(OTHER_STRUCTURE / 2) ** 0.5 * (config.structure is structure) for structure in Structure]
    code += [(OTHER_CAP / 2) ** 0.5 * (config.max_registers == cap) for cap in CAPS]
    return tuple(code)
