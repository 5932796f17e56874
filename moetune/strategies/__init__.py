"""Searches behind ask and tell. None of them loads torch, reads a clock or draws from global randomness."""

from __future__ import annotations

from collections.abc import Mapping

from moetune.strategies.base import Strategy, StrategyFactory, Terrain, TrialLog
from moetune.strategies.exhaustive import Exhaustive
from moetune.strategies.guided import Guided
from moetune.strategies.random import RandomOrder

DEFAULT_STRATEGY = "guided"
STRATEGIES: Mapping[str, StrategyFactory] = {"guided": Guided, "exhaustive": Exhaustive, "random": RandomOrder}
ABOUT: Mapping[str, str] = {
    "guided": "the default: a prior, a model of its errors over all token counts, and the neighbours of the best",
    "exhaustive": "every legal config at every token count: the truth, hours on a GPU",
    "random": "as many trials and compiles as the default has, drawn at random: the yardstick",
}

__all__ = [
    "ABOUT",
    "DEFAULT_STRATEGY",
    "STRATEGIES",
    "Exhaustive",
    "Guided",
    "RandomOrder",
    "Strategy",
    "StrategyFactory",
    "Terrain",
    "TrialLog",
]
