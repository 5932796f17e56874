"""What every search is: it is asked for configs and told how they ended. It never sees a clock or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moetune.outcome import Measured, Outcome
from moetune.space.prior import Problem
from moetune_kernels.config import MoEKernelConfig, Role

Guess = Callable[[MoEKernelConfig, int], float]


class Strategy(Protocol):
    """A search over the configs of one GEMM at one token count.

    It asks no config twice, stays inside its terrain, ends (``ask`` returns nothing), gives the same order for the same
    seed and the same answers, and survives failures.
    """

    def ask(self, count: int) -> Sequence[MoEKernelConfig]:
        """Return at most ``count`` configs to try next.

        None while answers are missing means that the search waits for them; none when all were told, that it is over.
        """
        ...

    def tell(self, config: MoEKernelConfig, outcome: Outcome) -> None:
        """Take the end of one trial that was asked for; told again, the later outcome holds."""
        ...


@dataclass
class TrialLog:
    """How every trial of a sweep so far ended: what all searches of the sweep share. The latest outcome holds.

    Attributes:
        trials: how many were recorded; as long as it is the same, so is the log.
    """

    trials: int = field(default=0, init=False)
    _times: dict[tuple[Role, int], dict[MoEKernelConfig, float]] = field(
        default_factory=dict[tuple[Role, int], dict[MoEKernelConfig, float]]
    )

    def record(self, role: Role, tokens: int, config: MoEKernelConfig, outcome: Outcome) -> None:
        """Keep the end of one trial in place of an earlier one of the same config at this token count."""
        time_us = outcome.median_us if isinstance(outcome, Measured) else float("inf")
        self.trials += 1
        self._times.setdefault((role, tokens), {})[config] = time_us

    def times_us(self, role: Role, tokens: int) -> Mapping[MoEKernelConfig, float]:
        """Return the time of every config tried at a token count; infinite for one that failed."""
        return self._times.get((role, tokens), {})

    def counts(self, role: Role) -> list[int]:
        """Return the token counts with trials of ``role``, ascending."""
        return sorted(tokens for known, tokens in self._times if known is role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terrain:
    """Where a strategy may go, and what is known of it.

    Args:
        problem: the GEMM.
        tokens: the token count.
        compiled: configs that are compiled already: trying one costs a few launches.
        reserve: other legal configs: trying one costs a compile first.
        neighbours: legal configs one step from a config, those that change most first; some are in neither list.
        guess: the prior's time of a config at any token count, in arbitrary units.
        kernels: how many configs outside ``compiled`` a search may ask for that keeps to the sweep's plan.
        trials: how many configs it may ask for in all.
        seeds: configs that won elsewhere; they may lie outside ``compiled``.
        log: the trials of this sweep so far; strategies read it.
    """

    problem: Problem
    tokens: int
    compiled: tuple[MoEKernelConfig, ...]
    reserve: tuple[MoEKernelConfig, ...] = ()
    neighbours: Callable[[MoEKernelConfig], Sequence[MoEKernelConfig]]
    guess: Guess
    kernels: int = 0
    trials: int
    seeds: tuple[MoEKernelConfig, ...] = ()
    log: TrialLog = field(default_factory=TrialLog)


StrategyFactory = Callable[[Terrain, int], Strategy]
