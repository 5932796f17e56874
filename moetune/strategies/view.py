"""What a search expects of configs at its token count: the prior's guess, corrected by the trials of the sweep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import erf, inf, log, pi, sqrt

import numpy as np

from moetune.strategies.base import Terrain
from moetune.strategies.surrogate import NOISE, Array, Sighting, Surrogate
from moetune_kernels.config import MoEKernelConfig

CANDIDATES = 250  # configs with the best expected times that are looked at closely
SIGHTINGS = 320  # of the nearest token counts that the model is fitted to
FARTHEST = 0.4  # of log time: an error of the guess beyond it says no more than this one
FAILED_RATIO = 2.5  # times the best: what a failure counts as
LEAST_GAIN = 0.0003  # of log time: less is not worth a trial


class Elsewhere:
    """What the nearest other token counts say of the prior's errors; worked out anew once the log holds more.

    Args:
        terrain: where the search is.
    """

    def __init__(self, terrain: Terrain) -> None:
        self._terrain = terrain
        self._trials = -1
        self._found: list[Sighting] = []

    def sightings(self) -> list[Sighting]:
        """Return at most as many as a model is fitted to, the nearest counts' first."""
        log_of, tokens, role = self._terrain.log, self._terrain.tokens, self._terrain.problem.role
        if self._trials != log_of.trials:
            self._trials, self._found = log_of.trials, []
            others = [count for count in log_of.counts(role) if count != tokens]
            for count in sorted(others, key=lambda count: abs(log(count / tokens))):
                if len(self._found) >= SIGHTINGS:
                    break
                self._found += _errors(self._terrain, count, log_of.times_us(role, count))
        return self._found


class View:
    """The model of one moment.

    Args:
        terrain: where the search is.
        times_us: all that was tried here, the latest times; infinite for failures.
        elsewhere: what other counts say, kept from view to view; asked of the log when None.
    """

    def __init__(
        self, terrain: Terrain, times_us: Mapping[MoEKernelConfig, float], elsewhere: Elsewhere | None = None
    ) -> None:
        self._terrain = terrain
        self._best_us = min(times_us.values(), default=inf)
        found = [*_errors(terrain, terrain.tokens, times_us), *(elsewhere or Elsewhere(terrain)).sightings()]
        self._surrogate = Surrogate(found[:SIGHTINGS])

    def expected(self, configs: Sequence[MoEKernelConfig]) -> Array:
        """Return the log of the time expected of each config; of no unit before the first trial here."""
        if not configs:
            return np.zeros(0)
        tokens = self._terrain.tokens
        guesses = np.log([self._terrain.guess(config, tokens) for config in configs])
        return guesses + self._surrogate.errors(configs, tokens)

    def by_expectation(self, configs: Iterable[MoEKernelConfig]) -> list[MoEKernelConfig]:
        """Return the configs, the fastest expected first."""
        pool = list(configs)
        return [pool[place] for place in np.argsort(self.expected(pool), kind="stable")]

    def best_of_each_height(self, configs: Sequence[MoEKernelConfig], within: float) -> list[MoEKernelConfig]:
        """Return the best expected config of each tile height that is within a ratio of the best of all."""
        expected = dict(zip(configs, self.expected(configs), strict=True))
        first: dict[int, MoEKernelConfig] = {}
        for config in sorted(configs, key=lambda config: expected[config]):
            first.setdefault(config.block_m, config)
        best = min(expected.values(), default=0.0)
        return [config for config in first.values() if expected[config] <= best + log(within)]

    def promising(self, configs: Sequence[MoEKernelConfig], count: int) -> list[MoEKernelConfig]:
        """Return at most ``count`` configs with the highest expected gain over the best, none without one.

        Each is chosen as if the ones before it had been tried and were as expected, so that near ones do not come
        together.
        """
        if not configs or count <= 0:
            return []
        expected = self.expected(configs)
        order = np.argsort(expected, kind="stable")[:CANDIDATES]
        expected = expected[order]
        near: list[MoEKernelConfig] = [configs[place] for place in order]
        best = log(self._best_us) if self._best_us < inf else float(expected.min())
        untaken = np.ones(len(near))
        covariance = self._surrogate.spread(near, self._terrain.tokens)
        variances = np.diag(covariance).copy()
        chosen: list[MoEKernelConfig] = []
        learnt: list[tuple[Array, float]] = []  # what each one chosen tells of the others, and its own variance
        for _ in range(min(count, len(near))):
            spreads = np.sqrt(np.maximum(variances, 1e-12))
            gains = untaken * _gains(best - expected, spreads)
            place = int(np.argmax(gains))
            if gains[place] < LEAST_GAIN:
                break
            chosen.append(near[place])
            untaken[place] = 0.0
            column = covariance[:, place].copy()
            for other, variance in learnt:  # only the columns of those chosen are ever asked for
                column -= other * other[place] / variance
            learnt.append((column, float(column[place] + NOISE**2)))
            variances -= column * column / learnt[-1][1]
        return chosen


def _gains(lead: Array, spreads: Array) -> Array:
    """Return the expected gain of normal variables that are expected ``lead`` under the best."""
    scaled = lead / spreads
    below = 0.5 * (1.0 + np.array([*map(erf, (scaled / sqrt(2.0)).tolist())]))
    density = np.exp(-0.5 * np.minimum(scaled * scaled, 700.0)) / sqrt(2.0 * pi)
    return lead * below + spreads * density


def _errors(terrain: Terrain, tokens: int, times_us: Mapping[MoEKernelConfig, float]) -> list[Sighting]:
    """Return the error of every guess at one token count; a failure counts as slow, where it was not guessed slow."""
    best_us = min(times_us.values(), default=inf)
    if best_us == inf:
        return []
    guesses = {config: terrain.guess(config, tokens) for config in times_us}
    errors = {config: log(time_us / guesses[config]) for config, time_us in times_us.items() if time_us < inf}
    level = float(np.median(list(errors.values())))
    for config, time_us in times_us.items():
        if time_us == inf:
            errors[config] = max(log(FAILED_RATIO * best_us / guesses[config]), level)
    bounded = {config: min(max(error, level - FARTHEST), level + FARTHEST) for config, error in errors.items()}
    return [Sighting(config, tokens, error) for config, error in bounded.items()]
