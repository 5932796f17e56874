"""Searches behind ask and tell. None of them loads torch, reads a clock or draws from global randomness."""

from __future__ import annotations

from collections.abc import Mapping

from moetune.strategies.base import Strategy, StrategyFactory, Terrain
from moetune.strategies.exhaustive import Exhaustive
from moetune.strategies.random import RandomOrder
from moetune.strategies.staged import Staged

STRATEGIES: Mapping[str, StrategyFactory] = {"staged": Staged, "exhaustive": Exhaustive, "random": RandomOrder}

__all__ = ["STRATEGIES", "Exhaustive", "RandomOrder", "Staged", "Strategy", "StrategyFactory", "Terrain"]
