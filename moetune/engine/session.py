"""The life of a sweep: compile everything once, then race, compose, decide and write at every token count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from moetune.engine.backend import Backend, Ceilings
from moetune.engine.bench import Bench, Journal, Key
from moetune.engine.budget import Allowance, Budget, Deadline
from moetune.engine.compose import FEW_FINALISTS, FINALISTS, block_ms, compose
from moetune.engine.costs import KERNEL_S, Costs
from moetune.engine.counting import count_winners
from moetune.engine.decide import NOISE, distrusted
from moetune.engine.entries import entry_of, with_figures, with_ranges
from moetune.engine.events import (
    CountersStarted,
    Emit,
    SpaceReady,
    TableWritten,
    TokenDone,
    TokenFailed,
    TokenRefused,
    TokenRevisited,
    TokenStarted,
    Warned,
)
from moetune.engine.finals import Finals, Verdict
from moetune.engine.memory import Memory
from moetune.engine.pace import Pace
from moetune.engine.race import Race, Standing
from moetune.engine.schedule import order
from moetune.engine.within import Within
from moetune.errors import RunError
from moetune.outcome import Failed, FailureKind, Measured, Trial
from moetune.space import FREE, Limits, Space, candidates, recorded_space, require_something
from moetune.strategies.base import Strategy, StrategyFactory
from moetune_kernels.config import Role
from moetune_kernels.plan import LayerPlan
from moetune_kernels.table import Entry

ENOUGH_KERNELS = 30  # compiled at once tell the speed of the pool
ENOUGH_NEWS = 8  # kernels that the searches still want to try at a token count are worth another look
READY_COUNTS = 3  # the last ones, during which the profiler loads: that takes seconds, as a short count does
COUNTERS_LIMIT_S = 120.0  # a profiler that has not answered by then is stuck


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to tune and how hard.

    Args:
        tokens: token counts, each at least 1.
        budget: wall time, running.
        kernels: how many kernels the first round compiles, both roles together.
        polish: how many kernels the searches may have compiled afterwards, both roles together.
        seed: of the strategies that draw.
        noise: the share of a time under which two plans are equal.
        strict: write no entry that was measured while the GPU was held down.
        limits: what may win.
    """

    tokens: tuple[int, ...]
    budget: Budget
    kernels: int
    polish: int
    seed: int = 0
    noise: float = NOISE
    strict: bool = False
    limits: Limits = FREE


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What a session needs of the world beside the backend.

    Args:
        journal: keeps every ended trial.
        known: screenings of earlier runs that need not be repeated.
        strategy: makes the search of one race.
        default_plan: the plan to beat at a token count.
        write_table: writes the entries so far and returns the file.
        emit: told of everything.
    """

    journal: Journal
    known: Mapping[Key, Trial]
    strategy: StrategyFactory
    default_plan: Callable[[int], LayerPlan]
    write_table: Callable[[Mapping[int, Entry], Ceilings], Path]
    emit: Emit


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """What a session leaves: entries by token count, the file, and how trials ended."""

    entries: Mapping[int, Entry]
    table_path: Path
    trials: int
    failures: Counter[FailureKind]
    removed: Counter[str]
    stopped_early: bool


@dataclass
class Session:
    """One sweep on one backend; ``run`` it once."""

    backend: Backend
    job: Job
    ports: Ports
    stopped_early: bool = False
    _memory: Memory = field(default_factory=Memory)
    _entries: dict[int, Entry] = field(default_factory=dict[int, Entry])
    _verdicts: dict[int, Verdict] = field(default_factory=dict[int, Verdict])
    _refused: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._emit = self.ports.emit
        self._bench = Bench(self.backend, self.ports.journal, self._emit, dict(self.ports.known))

    def run(self) -> SessionResult:
        """Run the sweep.

        Raises:
            RunError: no token count has a plan that runs and is right.
            UsageError: the limits leave nothing to try.
        """
        self._spaces = {role: self._space(role) for role in Role}
        require_something(self._spaces, self.job.tokens)
        self._within = Within(self._spaces, self._bench)
        self._bench.why_outside = self._within.why_outside
        self._ceilings = self.backend.ceilings()
        self.ports.journal.record_ceilings(self._ceilings.bytes_per_s, self._ceilings.flops)
        self._budget = Budget(None) if self._is_recorded else self.job.budget  # nothing to wait for in a replay
        costs = Costs(self.backend.shape, self._ceilings, self._compile())
        self._pace = Pace(self._budget, costs, self._bench, self._spaces, self.job.tokens, self.job.polish)
        counts = order(self.job.tokens)
        for place, tokens in enumerate(counts, start=1):
            self._emit(TokenStarted(tokens, place, len(counts)))
            if len(counts) - place < READY_COUNTS and self._pace.counters_fit(len(counts)):
                self.backend.prepare_counters()
            self._one_count(counts[place - 1 :])
        self._look_again()
        if not self._entries:
            if self._refused:
                raise RunError(f"no entry is worth keeping: {self._refused[0]}; cool the GPU, or leave --strict away")
            reasons = ", ".join(f"{count} {kind.value}" for kind, count in self._bench.failures.most_common())
            inside = f" inside {self.job.limits.text}" if self.job.limits.any else ""
            raise RunError(
                f"no token count has a plan{inside} that runs and is right ({reasons}); see `moetune doctor`"
            )
        self._count_winners()
        return SessionResult(
            entries=with_ranges(self._entries),
            table_path=self._write(),
            trials=self._bench.trials,
            failures=self._bench.failures,
            removed=sum((space.removed + space.outside for space in self._spaces.values()), Counter[str]()),
            stopped_early=self.stopped_early,
        )

    # before the first token count

    def _space(self, role: Role) -> Space:
        shape, device, tokens = self.backend.shape, self.backend.device, self.job.tokens
        recorded = self.backend.recorded(role)
        if recorded is None:
            limit = max(self.job.kernels // len(Role), 1)
            space = candidates(shape, device, role, tokens, limit, self.job.limits)
        else:
            space = recorded_space(shape, device, role, tokens, recorded, self.job.limits)
        counts = space.legal, space.removed, space.outside, space.duplicates, space.ceilings
        self._emit(SpaceReady(role, len(space.configs), *counts))
        return space

    @property
    def _is_recorded(self) -> bool:
        return any(space.closed for space in self._spaces.values())

    def _compile(self) -> float:
        """Compile the default plans' kernels and the candidates; return the seconds per kernel."""
        defaults = [self.ports.default_plan(tokens) for tokens in self.job.tokens]
        wanted = {role: [*(plan.config(role) for plan in defaults), *self._spaces[role].configs] for role in Role}
        started_s = self._budget.clock()
        if not self._bench.compile(wanted, self._budget.compile_deadline()):
            self._cut_short("the budget cut the compiles short: the least promising candidates are left out")
        if self.job.limits.any:
            self._within.report(self.job.tokens, self._emit)
        compiled = len(self._bench.compiled)
        return (self._budget.clock() - started_s) / compiled if compiled >= ENOUGH_KERNELS else KERNEL_S

    # one token count

    def _one_count(self, counts_left: list[int]) -> None:
        tokens = counts_left[0]
        # Opened before its time is counted: the first one waits for CUDA, its libraries and the weights.
        verdict = self.backend.open(tokens) or self._tune(tokens, self._pace.allow(counts_left))
        if isinstance(verdict, Failed):
            if tokens not in self._entries:
                self._emit(TokenFailed(tokens, verdict.reason))
            return
        bound_us = self.backend.bound_us()
        self.ports.journal.record_bound(tokens, bound_us)
        if self.job.strict and (reason := distrusted(verdict.winner.measured)):
            self._refused.append(reason)
            if tokens not in self._entries:  # a second look leaves what the first one found
                self._emit(TokenRefused(tokens, reason))
            return
        cost = self._within.cost(verdict, self.ports.default_plan(tokens))
        if cost is not None:
            self._emit(Warned(f"{tokens} tokens: {cost}"))
        entry = entry_of(tokens, verdict, bound_us, self._bench.compiled)
        self._entries[tokens] = entry
        self._verdicts[tokens] = verdict
        self._memory.winners[tokens] = verdict.winner.plan
        self._write()
        self._emit(TokenDone(with_ranges(self._entries)[tokens]))

    def _tune(self, tokens: int, allowance: Allowance) -> Verdict | Failed:
        started_s, was_cut = self._budget.clock(), False
        preferred = self._memory.neighbours(tokens)
        plans: list[LayerPlan] = []
        if allowance.races or not preferred:
            plans, was_cut = self._raced_plans(tokens, allowance)
        else:
            was_cut = True
            self._cut_short(
                f"{tokens} tokens had no time for a race: the default and neighbouring winners were compared"
            )
        default = self.ports.default_plan(tokens)
        finals = Finals(self._bench, tokens, default, allowance.deadline, self.job.noise, self._within.holds)
        before = [self._memory.winners[tokens]] if tokens in self._memory.winners else []
        # Where layers are recorded, a sum of kernels has no chance to be measured, and none to be believed before them.
        recorded = [plan for plan in self.backend.recorded_plans(tokens) if self._within.holds(plan)]
        entrants = recorded or [*plans, *before, *preferred]
        verdict = self._within.explained(finals.run(list(dict.fromkeys(entrants)), preferred), default)
        if not before:
            self._pace.learn(allowance, self._budget.clock() - started_s, was_cut)
        return verdict

    def _raced_plans(self, tokens: int, allowance: Allowance) -> tuple[list[LayerPlan], bool]:
        """Return the finalists of both races, and whether one of these was cut short."""
        may_compile = allowance.polish
        gate_up, cut_gate_up = self._race(Role.GATE_UP, tokens, allowance.gate_up_deadline, may_compile)
        down, cut_down = self._race(Role.DOWN, tokens, allowance.down_deadline, may_compile)
        routing_us: dict[int, float] = {}
        for block_m in block_ms(gate_up, down):
            routing = self._bench.routing(tokens, block_m)
            if isinstance(routing, Measured):
                routing_us[block_m] = routing.median_us
        self._bench.combine(tokens)  # the same for all plans: recorded for replays and reports
        cut = [role.value for role, was_cut in ((Role.GATE_UP, cut_gate_up), (Role.DOWN, cut_down)) if was_cut]
        if cut:
            self._cut_short(f"{tokens} tokens: the budget cut the race of {' and '.join(cut)} short")
        finalists = FINALISTS if allowance.polish else FEW_FINALISTS
        return [composed.plan for composed in compose(gate_up, down, routing_us, finalists)], bool(cut)

    def _race(
        self,
        role: Role,
        tokens: int,
        deadline: Deadline,
        may_compile: bool,  # noqa: FBT001  # of the budget, no mode
    ) -> tuple[list[Standing], bool]:
        race = Race(self._bench, role, tokens, deadline)
        standings = race.run(self._search(role, tokens, may_compile=may_compile))
        for config, outcome in self._bench.ended(role, tokens).items():
            self._memory.log.record(role, tokens, config, outcome)
        return standings, race.was_cut

    def _search(self, role: Role, tokens: int, *, may_compile: bool) -> Strategy:
        quota = self._pace.quota(role, tokens)
        terrain = self._memory.terrain(
            self._spaces[role],
            self._bench.inside(role),
            tokens,
            quota if may_compile else replace(quota, kernels=0),
            seeds=[plan.config(role) for plan in (self.ports.default_plan(tokens), *self._memory.neighbours(tokens))],
        )
        return self.ports.strategy(terrain, self.job.seed)

    # after the last token count

    def _look_again(self) -> None:
        """Race promising kernels that were compiled after a token count's turn there too, while there is time.

        The most tokens come first: there one kernel in a hundred is the best, and each count finds others.
        """
        if self._is_recorded:
            return
        counts = [tokens for tokens in sorted(self._entries, reverse=True) if self._has_news(tokens)]
        for place, tokens in enumerate(counts, start=1):
            if self._pace.fits(tokens):
                self._emit(TokenRevisited(tokens, place, len(counts)))
                self._one_count([tokens])

    def _has_news(self, tokens: int) -> bool:
        """Whether the searches would try a few kernels here that the sweep compiled for other counts."""
        news = [
            config
            for role in Role
            for config in self._search(role, tokens, may_compile=False).ask(ENOUGH_NEWS)
            if not self._bench.known(role, tokens, config)
        ]
        return len(news) >= ENOUGH_NEWS

    def _count_winners(self) -> None:
        """Read hardware counters for the winners, where machine and budget allow it; else figures stay as they are."""
        if self._is_recorded:
            return  # a recording holds what was counted
        if not self._pace.counters_fit(len(self._entries)):
            self._emit(Warned("no time was left for hardware counters: figures are estimates"))
            return
        self._emit(CountersStarted(len(self._entries)))
        limit_s = min(self._budget.remaining_s, COUNTERS_LIMIT_S)
        winners = {tokens: verdict.winner for tokens, verdict in sorted(self._verdicts.items())}
        for tokens, figures in count_winners(self._bench, winners, limit_s).items():
            self._entries[tokens] = with_figures(self._entries[tokens], figures)

    def _write(self) -> Path:
        entries = with_ranges(self._entries)
        path = self.ports.write_table(entries, self._ceilings)
        self._emit(TableWritten(path, len(entries)))
        return path

    def _cut_short(self, text: str) -> None:
        self.stopped_early = True
        self._emit(Warned(text))
