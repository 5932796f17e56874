"""The race of one GEMM's configs at one token count: few samples for all, many for the best, wrong ones out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from moetune.engine.bench import Bench, Gate, time_of
from moetune.engine.budget import Deadline
from moetune.outcome import Failed, FailureKind, Measured
from moetune.strategies.base import Strategy
from moetune_kernels.config import MoEKernelConfig, Role

BATCH = 24  # configs asked for at once, at most; those to compile are one round of the compile pool
SAFE_ENTRANTS = 6  # configs that race even when the deadline has passed, so that there is something to pick
OVERALL_RATIO = 1.6  # a block_m this far behind cannot be made good by the other GEMM


@dataclass(frozen=True, slots=True)
class Heat:
    """One later heat: who is in (times the best of its block_m, and at most so many of each), and how often timed."""

    samples: int
    within: float
    per_block_m: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """How often a race times: samples of each entrant, then the heats."""

    entry_samples: int
    heats: tuple[Heat, Heat]


SHORT = Pattern(3, (Heat(samples=9, within=1.25, per_block_m=8), Heat(samples=25, within=1.06, per_block_m=4)))
# A kernel of milliseconds reads the same within 1% each time, and at 64 experts of 4096x14336 one sample is 2 to 15 ms.
LONG = Pattern(1, (Heat(samples=5, within=1.2, per_block_m=8), Heat(samples=15, within=1.06, per_block_m=4)))
LONG_US = 1500.0


def pattern_of(kernel_us: float) -> Pattern:
    """Return how often to time kernels that take about ``kernel_us``."""
    return LONG if kernel_us >= LONG_US else SHORT


@dataclass(frozen=True, slots=True)
class Standing:
    """One verified config and its time."""

    config: MoEKernelConfig
    measured: Measured


@dataclass
class Race:
    """All heats of one role at one token count.

    Args:
        bench: where trials happen.
        role: which GEMM.
        tokens: the open token count.
        deadline: when heats are cut to their minimum.
    """

    bench: Bench
    role: Role
    tokens: int
    deadline: Deadline
    was_cut: bool = False

    def run(self, strategy: Strategy) -> list[Standing]:
        """Run the race and return the verified ones: those timed most often first, and of those the fastest first.

        Times of fewer samples are no match for them: in a long burst the power cap makes each launch up to 5% slower.
        """
        gate = Gate(lambda first_us: pattern_of(first_us).entry_samples)
        entrants = self._enter(strategy, gate)
        while True:
            survivors = self._verified_survivors(entrants)
            while self._readmit(entrants, gate):
                survivors = self._verified_survivors(entrants)
            if self._run_heats(survivors):
                return self._standings(entrants)

    def _run_heats(self, survivors: Sequence[MoEKernelConfig]) -> bool:
        """Run both heats; False when a finisher proved wrong after its launches, and those it kept out must be heard."""
        first, last = self._heats(survivors)
        finishers = self._survivors(survivors, first)
        for place, config in enumerate(finishers):
            if self._is_cut(place):
                break
            self.bench.sample(self.role, self.tokens, config, first.samples)
        right = True
        for place, config in enumerate(self._survivors(finishers, last)):
            if self._is_cut(place):
                break
            self.bench.sample_and_recheck(self.role, self.tokens, config, last.samples)
            right = right and self._outcome_kind(config) is not FailureKind.WRONG
        return right

    def _enter(self, strategy: Strategy, gate: Gate) -> list[MoEKernelConfig]:
        """Return all that were asked for, and those that an earlier race at this token count left."""
        entrants = [config for config, end in self.bench.ended(self.role, self.tokens).items() if time_of(end) < inf]
        while asked := strategy.ask(BATCH):
            if self._is_cut(len(entrants)):
                break
            self.bench.compile({self.role: asked}, self.deadline)
            for config in asked:
                if self._is_cut(len(entrants)):
                    break
                strategy.tell(config, self.bench.enter(self.role, self.tokens, config, gate))
                entrants.append(config)
        return list(dict.fromkeys(entrants))

    def _is_cut(self, place: int) -> bool:
        """Whether the deadline cuts the entrant at ``place``; remembered, because the result is then a quick pick."""
        cut = place >= SAFE_ENTRANTS and self.deadline.passed
        self.was_cut = self.was_cut or cut
        return cut

    def _verified_survivors(self, entrants: Sequence[MoEKernelConfig]) -> list[MoEKernelConfig]:
        """Return the survivors of the entry, all right: a wrong one makes room for the next and sets no pace."""
        while True:
            survivors = self._survivors(entrants, self._heats(entrants)[0])
            verdicts = [self.bench.verify(self.role, self.tokens, config) for config in survivors]
            if all(verdicts):
                return survivors

    def _readmit(self, entrants: Sequence[MoEKernelConfig], gate: Gate) -> bool:
        """Race again those that were refused against a first launch that proved wrong; False when there are none."""
        if gate.holder is None or self._outcome_kind(gate.holder) is not FailureKind.WRONG:
            return False
        refused = [config for config in entrants if self._outcome_kind(config) is FailureKind.SLOW]
        gate.open_again()
        for config in refused:
            self.bench.forget(self.role, self.tokens, config)
            self.bench.enter(self.role, self.tokens, config, gate)
        return bool(refused)

    def _heats(self, configs: Sequence[MoEKernelConfig]) -> tuple[Heat, Heat]:
        return pattern_of(min(map(self._time_us, configs), default=0.0)).heats

    def _outcome_kind(self, config: MoEKernelConfig) -> FailureKind | None:
        trial = self.bench.known(self.role, self.tokens, config)
        return trial.outcome.kind if trial is not None and isinstance(trial.outcome, Failed) else None

    def _time_us(self, config: MoEKernelConfig) -> float:
        trial = self.bench.known(self.role, self.tokens, config)
        return float("inf") if trial is None else time_of(trial.outcome)

    def _survivors(self, configs: Sequence[MoEKernelConfig], heat: Heat) -> list[MoEKernelConfig]:
        """Return those of each block_m that are near its best, the fastest first."""
        ranked = sorted(configs, key=self._time_us)
        ranked = [config for config in ranked if self._time_us(config) < float("inf")]
        if not ranked:
            return []
        overall_us = self._time_us(ranked[0])
        found: dict[int, list[MoEKernelConfig]] = {}
        for config in ranked:
            peers = found.setdefault(config.block_m, [])
            best_us = self._time_us(peers[0]) if peers else self._time_us(config)
            near = self._time_us(config) <= heat.within * best_us and best_us <= OVERALL_RATIO * overall_us
            if near and len(peers) < heat.per_block_m:
                peers.append(config)
        return sorted((config for peers in found.values() for config in peers), key=self._time_us)

    def _standings(self, entrants: Sequence[MoEKernelConfig]) -> list[Standing]:
        found: list[Standing] = []
        for config in entrants:
            trial = self.bench.known(self.role, self.tokens, config)
            if trial is not None and trial.verified and isinstance(trial.outcome, Measured):
                found.append(Standing(config, trial.outcome))
        return sorted(found, key=lambda standing: (-standing.measured.samples, standing.measured.median_us))
