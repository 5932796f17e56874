"""The race of one GEMM's configs at one token count: few samples for all, many for the best, wrong ones out.

It has two parts, so that one can be left for later: the entry (:mod:`moetune.engine.entrance`) gives every config that a
search asks for a few samples; :func:`finish` verifies the best and times them often.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import inf

from moetune.engine.backend import EntryTerms
from moetune.engine.bench import Bench, time_of
from moetune.engine.budget import Deadline
from moetune.engine.entrance import Entrance, by_turns
from moetune.engine.gate import SLOW_RATIO, Gate
from moetune.outcome import Failed, FailureKind, Measured, Outcome
from moetune.strategies.base import Strategy
from moetune_kernels.config import MoEKernelConfig, Role

SAFE_ENTRANTS = 6  # configs that race even when the deadline has passed, so that there is something to pick
# A tile height whose best kernels together are this far behind those of another one is no good for the layer.
HEIGHT_RATIO = 1.08


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


# Medians of three samples are off by 0.5 to 1.2% (standard deviation, H200, seven sweeps), those of nine by 0.4%: a
# config that is behind by five of these is not the best.
SHORT = Pattern(3, (Heat(samples=9, within=1.06, per_block_m=6), Heat(samples=25, within=1.025, per_block_m=4)))
# A kernel of milliseconds reads the same within 1% each time, and at 64 experts of 4096x14336 one sample is 2 to 15 ms.
LONG = Pattern(1, (Heat(samples=5, within=1.08, per_block_m=6), Heat(samples=15, within=1.03, per_block_m=4)))
LONG_US = 1500.0
TERMS = EntryTerms(slow_ratio=SLOW_RATIO, samples=SHORT.entry_samples, long_samples=LONG.entry_samples, long_us=LONG_US)


def pattern_of(kernel_us: float) -> Pattern:
    """Return how often to time kernels that take about ``kernel_us``."""
    return LONG if kernel_us >= LONG_US else SHORT


@dataclass(frozen=True, slots=True)
class Standing:
    """One verified config and its time."""

    config: MoEKernelConfig
    measured: Measured


def worthwhile(best_us: Sequence[Mapping[int, float]]) -> set[int]:
    """Return the tile heights that may be part of the best layer.

    Args:
        best_us: of each race, its best time per tile height.

    >>> sorted(worthwhile([{16: 100.0, 32: 101.0, 64: 140.0}, {16: 50.0, 32: 49.0, 64: 30.0}]))
    [16, 32]
    """
    shared = {block_m for best in best_us for block_m in best if all(block_m in other for other in best_us)}
    total_us = {block_m: sum(best[block_m] for best in best_us) for block_m in shared}
    limit_us = HEIGHT_RATIO * min(total_us.values(), default=inf)
    return {block_m for block_m, us in total_us.items() if us <= limit_us}


@dataclass
class Race:
    """All heats of one role at one token count.

    Args:
        bench: where trials happen.
        role: which GEMM.
        tokens: the open token count.

    Attributes:
        was_cut: whether a deadline cut it short.
        asked: every config that a search of this sweep asked for.
    """

    bench: Bench
    role: Role
    tokens: int
    was_cut: bool = False
    asked: dict[MoEKernelConfig, None] = field(default_factory=dict[MoEKernelConfig, None])
    _entrants: dict[MoEKernelConfig, None] = field(default_factory=dict[MoEKernelConfig, None])
    _late: dict[MoEKernelConfig, None] = field(default_factory=dict[MoEKernelConfig, None])

    def __post_init__(self) -> None:
        self._gate = Gate(TERMS)
        # Those that an earlier race at this token count left are in.
        ended = self.bench.ended(self.role, self.tokens).items()
        self._entrants.update({config: None for config, end in ended if time_of(end) < inf})

    # part one

    def surveying(self, strategy: Strategy, deadline: Deadline) -> Entrance:
        """Return the entry where what is compiled for it alone is left for :meth:`enter_late`."""
        return Entrance(self, strategy, deadline, self._is_wish)

    def entering(self, strategy: Strategy, deadline: Deadline) -> Entrance:
        """Return the entry that waits for what the compiler has still."""
        return Entrance(self, strategy, deadline)

    def enter_late(self, deadline: Deadline) -> None:
        """Time what was left, each as it comes from the compiler."""
        while self._late:
            ready = self.ready(self._late, deadline)
            with closing(self.times(ready, deadline)) as ends:
                for config, _ in ends:
                    del self._late[config]
            if not ready or any(config in self._late for config in ready):
                return

    def request(self, asked: Sequence[MoEKernelConfig], is_left: Callable[[MoEKernelConfig], bool]) -> None:
        """Have what a search asked for compiled, and note what is left for later."""
        self.bench.collect()  # what came from the compiler since is no reason to leave it
        self.asked.update(dict.fromkeys(asked))
        self.bench.wish((self.role, config) for config in asked)
        self._late.update(dict.fromkeys(config for config in asked if is_left(config)))

    def is_late(self, config: MoEKernelConfig) -> bool:
        """Whether a config was left for later."""
        return config in self._late

    def hurry(self, strategy: Strategy, deadline: Deadline) -> None:
        """Time what is compiled of what the search asks for, and what came of earlier wishes; wait only for a safe few."""
        self._glean(deadline)
        by_turns([Entrance(self, strategy, deadline, self._is_under_way)])
        while len(self._entrants) < SAFE_ENTRANTS and self._late and self.ready(self._late, deadline):
            self._glean(deadline)
        self._glean(deadline)

    def _glean(self, deadline: Deadline) -> None:
        """Time those of what was left that have come."""
        self.bench.collect()
        come = [config for config in self._late if not self._is_under_way(config)]
        with closing(self.times(come, deadline)) as ends:
            for config, _ in ends:
                del self._late[config]

    def _is_under_way(self, config: MoEKernelConfig) -> bool:
        return (self.role, config) in self.bench.under_way

    def _is_wish(self, config: MoEKernelConfig) -> bool:
        kernel = self.role, config
        return kernel in self.bench.under_way and kernel not in self.bench.promised

    def ready(self, configs: Collection[MoEKernelConfig], deadline: Deadline) -> list[MoEKernelConfig]:
        """Return those of ``configs`` that no compiler has any more, waiting for one; none when the deadline passed first."""
        if not self.bench.await_any([(self.role, config) for config in configs], deadline):
            self.was_cut = True
        return [config for config in configs if (self.role, config) not in self.bench.under_way]

    def times(
        self, configs: Sequence[MoEKernelConfig], deadline: Deadline
    ) -> Generator[tuple[MoEKernelConfig, Outcome]]:
        """Let configs in and yield how each ended, until the deadline cuts the rest."""
        with closing(self.bench.enter(self.role, self.tokens, configs, self._gate)) as ends:
            for config in configs:
                if self._is_cut(len(self._entrants), deadline):
                    return
                self._entrants[config] = None
                yield config, next(ends)

    def _is_cut(self, place: int, deadline: Deadline) -> bool:
        """Whether the deadline cuts the entrant at ``place``; remembered, because the result is then a quick pick."""
        cut = place >= SAFE_ENTRANTS and deadline.passed
        self.was_cut = self.was_cut or cut
        return cut

    # part two

    def best_us(self) -> dict[int, float]:
        """Return the best time of each tile height."""
        found: dict[int, float] = {}
        for config in self._entrants:
            time_us = self._time_us(config)
            if time_us < found.get(config.block_m, inf):
                found[config.block_m] = time_us
        return found

    def verify(self, heights: Collection[int]) -> bool:
        """Compare the survivors of the entry with the reference; False when one is wrong, and all has to be asked anew.

        A wrong one makes room for the next and sets no pace.
        """
        survivors = self._survivors(self._of(heights), self._heats(heights)[0])
        verdicts = self.bench.verify(self.role, self.tokens, survivors)
        return not self._readmit() and all(verdicts)

    def run_heats(self, heights: Collection[int], deadline: Deadline) -> bool:
        """Run both heats; False when a finisher proved wrong after its launches, and those it kept out must be heard."""
        first, last = self._heats(heights)
        finishers = self._survivors(self._of(heights), first)
        self._heat(finishers, deadline, self.bench.sample(self.role, self.tokens, finishers, first.samples))
        last_ones = self._survivors(finishers, last)
        ends = self.bench.sample_and_recheck(self.role, self.tokens, last_ones, last.samples)
        outcomes = self._heat(last_ones, deadline, ends)
        return not any(isinstance(end, Failed) and end.kind is FailureKind.WRONG for end in outcomes)

    def _heat(self, configs: Sequence[MoEKernelConfig], deadline: Deadline, ends: Generator[Outcome]) -> list[Outcome]:
        """Return how those of ``configs`` end that the deadline does not cut."""
        found: list[Outcome] = []
        with closing(ends):
            for place, _ in enumerate(configs):
                if self._is_cut(place, deadline):
                    break
                found.append(next(ends))
        return found

    def standings(self) -> list[Standing]:
        """Return the verified ones: those timed most often first, and of those the fastest first.

        Times of fewer samples are no match for them: in a long burst the power cap makes each launch up to 5% slower.
        """
        found: list[Standing] = []
        for config in self._entrants:
            trial = self.bench.known(self.role, self.tokens, config)
            if trial is not None and trial.verified and isinstance(trial.outcome, Measured):
                found.append(Standing(config, trial.outcome))
        return sorted(found, key=lambda standing: (-standing.measured.samples, standing.measured.median_us))

    def _readmit(self) -> bool:
        """Race again those that were refused against a first launch that proved wrong; False when there are none."""
        holder = self._gate.holder
        if holder is None or self._outcome_kind(holder) is not FailureKind.WRONG:
            return False
        refused = [config for config in self._entrants if self._outcome_kind(config) is FailureKind.SLOW]
        self._gate.open_again()
        for config in refused:
            self.bench.forget(self.role, self.tokens, config)
        for _ in self.bench.enter(self.role, self.tokens, refused, self._gate):
            pass
        return bool(refused)

    def _of(self, heights: Collection[int]) -> list[MoEKernelConfig]:
        return [config for config in self._entrants if config.block_m in heights]

    def _heats(self, heights: Collection[int]) -> tuple[Heat, Heat]:
        return pattern_of(min(map(self._time_us, self._of(heights)), default=0.0)).heats

    def _outcome_kind(self, config: MoEKernelConfig) -> FailureKind | None:
        trial = self.bench.known(self.role, self.tokens, config)
        return trial.outcome.kind if trial is not None and isinstance(trial.outcome, Failed) else None

    def _time_us(self, config: MoEKernelConfig) -> float:
        trial = self.bench.known(self.role, self.tokens, config)
        return inf if trial is None else time_of(trial.outcome)

    def _survivors(self, configs: Sequence[MoEKernelConfig], heat: Heat) -> list[MoEKernelConfig]:
        """Return those of each block_m that are near its best, the fastest first."""
        ranked = sorted(configs, key=self._time_us)
        found: dict[int, list[MoEKernelConfig]] = {}
        for config in ranked:
            peers = found.setdefault(config.block_m, [])
            best_us = self._time_us(peers[0]) if peers else self._time_us(config)
            if self._time_us(config) < inf and self._time_us(config) <= heat.within * best_us:
                peers.extend([config] if len(peers) < heat.per_block_m else [])
        return sorted((config for peers in found.values() for config in peers), key=self._time_us)


def finish(races: Sequence[Race], deadline: Deadline) -> None:
    """Verify and time the best of all ``races`` of a layer."""
    while True:
        heights = worthwhile([race.best_us() for race in races])
        right = [race.verify(heights) for race in races]
        if all(right):
            right = [race.run_heats(heights, deadline) for race in races]
        if all(right):
            return
