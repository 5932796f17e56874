"""Strategies side by side on recorded times: regret, trials, kernels and seconds over many seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log1p
from statistics import fmean
from typing import Any

from moetune.engine.rehearsal import Found, Truth, rehearse
from moetune.strategies.base import StrategyFactory
from moetune_kernels.config import MoEKernelConfig, Role


@dataclass(frozen=True, slots=True)
class Regret:
    """How far the picks were from the best recorded: the geometric mean and the worst, each 0.01 for one percent."""

    geomean: float
    worst: float

    @classmethod
    def of(cls, races: Sequence[Found]) -> Regret:
        """Return the regret of ``races``; infinite where one found nothing that runs."""
        worst = max(race.regret for race in races)
        if worst == inf:
            return cls(inf, inf)
        return cls(exp(fmean(log1p(race.regret) for race in races)) - 1.0, worst)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One strategy over all seeds.

    Args:
        strategy: its name.
        seeds: how many sweeps were rehearsed.
        regret: over token counts, both GEMMs and seeds.
        by_tokens: the same per token count.
        trials: configs timed per GEMM and token count, on average.
        share: trials over recorded configs.
        kernels: distinct kernels compiled in a sweep, both GEMMs: the most of all seeds.
        seconds: of a sweep's searches by the cost model, on average.
    """

    strategy: str
    seeds: int
    regret: Regret
    by_tokens: Mapping[int, Regret]
    trials: float
    share: float
    kernels: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; an infinite regret is null."""
        return {
            "strategy": self.strategy,
            "seeds": self.seeds,
            "regret": _regret_json(self.regret),
            "by_tokens": {str(tokens): _regret_json(regret) for tokens, regret in self.by_tokens.items()},
            "trials": round(self.trials, 3),
            "share": round(self.share, 6),
            "kernels": self.kernels,
            "seconds": round(self.seconds, 3),
        }


def compare(
    truth: Truth, strategies: Mapping[str, StrategyFactory], seeds: int, tokens: Sequence[int], swept: Sequence[int]
) -> list[Score]:
    """Rehearse a sweep of ``swept`` with each strategy and each of the first ``seeds`` seeds; judge it at ``tokens``."""
    guesses: dict[tuple[Role, int, MoEKernelConfig], float] = {}
    return [_score(truth, name, make, (seeds, tokens, swept), guesses) for name, make in strategies.items()]


def _score(
    truth: Truth,
    name: str,
    make: StrategyFactory,
    asked: tuple[int, Sequence[int], Sequence[int]],
    guesses: dict[tuple[Role, int, MoEKernelConfig], float],
) -> Score:
    seeds, tokens, swept = asked
    runs = [rehearse(truth, make, seed, swept, guesses) for seed in range(seeds)]
    everything = [race for run in runs for race in run.races]
    judged = [race for race in everything if race.tokens in tokens]
    return Score(
        strategy=name,
        seeds=seeds,
        regret=Regret.of(judged),
        by_tokens={count: Regret.of([race for race in judged if race.tokens == count]) for count in sorted(tokens)},
        trials=fmean(race.trials for race in everything),
        share=sum(race.trials for race in everything) / sum(race.recorded for race in everything),
        kernels=max(run.kernels for run in runs),
        seconds=fmean(run.seconds for run in runs),
    )


def _regret_json(regret: Regret) -> dict[str, float | None]:
    known = {"geomean": regret.geomean, "worst": regret.worst}
    return {name: round(value, 6) if value < inf else None for name, value in known.items()}
