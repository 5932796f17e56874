"""The life of a sweep: survey the token counts that want kernels of their own, then tune every count and write it.

Compile processes work beside all of it. A survey gives candidates a few samples and asks for the kernels that look good
from there; while these compile, the GPU surveys the next count. When the counts are tuned, their kernels are ready.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moetune.engine.backend import Backend, Ceilings, Kernel
from moetune.engine.bench import Bench, Journal, Key
from moetune.engine.budget import Allowance, Budget
from moetune.engine.compose import block_ms, compose
from moetune.engine.costs import Costs
from moetune.engine.counting import count_winners
from moetune.engine.decide import NOISE, distrusted
from moetune.engine.entries import entry_of, with_figures, with_ranges, with_switch
from moetune.engine.events import (
    CountersStarted,
    Emit,
    GapProbed,
    SpaceReady,
    SurveyStarted,
    TableWritten,
    TokenDone,
    TokenFailed,
    TokenRefused,
    TokenStarted,
    Warned,
)
from moetune.engine.finals import Finals, Verdict
from moetune.engine.ladder import WORTH_AN_ENTRY, Ladder, gaps
from moetune.engine.memory import Memory
from moetune.engine.pace import Pace
from moetune.engine.race import Race, finish
from moetune.engine.schedule import Quota, order
from moetune.engine.within import Within
from moetune.errors import RunError
from moetune.outcome import Failed, FailureKind, Measured, Trial
from moetune.space import FREE, Limits, Space, candidates, recorded_space, require_something
from moetune.strategies.base import Strategy, StrategyFactory
from moetune_kernels.config import Role
from moetune_kernels.plan import LayerPlan
from moetune_kernels.table import Entry

READY_COUNTS = 5  # the last ones, during which the profiler loads: that takes seconds, as several short counts do
COUNTERS_LIMIT_S = 120.0  # a profiler that has not answered by then is stuck


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to tune and how hard.

    Args:
        tokens: token counts, each at least 1.
        budget: wall time, running.
        kernels: how many candidates are compiled at the start, both roles together.
        polish: how many kernels the searches may have compiled besides, both roles together.
        probes: between how many neighbouring entries plans are timed, to see what serves there and what that loses.
        seed: of the strategies that draw.
        noise: the share of a time under which two plans are equal.
        strict: write no entry that was measured while the GPU was held down.
        limits: what may win.
    """

    tokens: tuple[int, ...]
    budget: Budget
    kernels: int
    polish: int
    probes: int = 0
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
    """What a session leaves: entries by token count, what was timed between them, the file, and how trials ended."""

    entries: Mapping[int, Entry]
    table_path: Path
    trials: int
    failures: Counter[FailureKind]
    removed: Counter[str]
    stopped_early: bool
    probes: tuple[GapProbed, ...] = ()


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
    _surveyed: dict[tuple[Role, int], Race] = field(default_factory=dict[tuple[Role, int], Race])
    _probes: list[GapProbed] = field(default_factory=list[GapProbed])

    def __post_init__(self) -> None:
        self._emit = self.ports.emit
        self._bench = Bench(self.backend, self.ports.journal, self._emit, dict(self.ports.known))

    def run(self) -> SessionResult:
        """Run the sweep.

        Raises:
            RunError: no token count has a plan that runs and is right.
            UsageError: the limits leave nothing to try.
        """
        self._prepare()
        counts = order(self.job.tokens)
        self._survey(counts)
        self._await_first_kernels()
        for place, tokens in enumerate(counts, start=1):
            self._emit(TokenStarted(tokens, place, len(counts)))
            if len(counts) - place < READY_COUNTS and self._pace.counters_fit(len(counts)):
                self.backend.prepare_counters()
            self._one_count(counts[place - 1 :])
        if not self._entries:
            raise self._why_nothing()
        self._look_between()
        self._count_winners()
        return SessionResult(
            entries=with_ranges(self._entries),
            table_path=self._write(),
            trials=self._bench.trials,
            failures=self._bench.failures,
            removed=sum((space.removed + space.outside for space in self._spaces.values()), Counter[str]()),
            stopped_early=self.stopped_early,
            probes=tuple(self._probes),
        )

    def _why_nothing(self) -> RunError:
        if self._refused:
            return RunError(f"no entry is worth keeping: {self._refused[0]}; cool the GPU, or leave --strict away")
        reasons = ", ".join(f"{count} {kind.value}" for kind, count in self._bench.failures.most_common())
        inside = f" inside {self.job.limits.text}" if self.job.limits.any else ""
        return RunError(f"no token count has a plan{inside} that runs and is right ({reasons}); see `moetune doctor`")

    # before the first token count

    def _prepare(self) -> None:
        """Choose the candidates and have them compiled, while the GPU tells its limits."""
        self._spaces = {role: self._space(role) for role in Role}
        require_something(self._spaces, self.job.tokens)
        self._within = Within(self._spaces, self._bench)
        self._bench.why_outside = self._within.why_outside
        self._budget = Budget(None) if self._is_recorded else self.job.budget  # nothing to wait for in a replay
        self._bench.request(self._first_kernels())
        self._bench.promised.update(self._bench.under_way)
        self._ceilings = self.backend.ceilings()
        self.ports.journal.record_ceilings(self._ceilings.bytes_per_s, self._ceilings.flops)
        if self._is_recorded or self.job.limits.any:
            self._await_first_kernels()
        if self.job.limits.any:  # what is inside them, only the compiler's reports tell
            self._within.report(self.job.tokens, self._emit)
        costs = Costs(self.backend.shape, self._ceilings)
        self._pace = Pace(self._budget, costs, self._bench, self._spaces, self.job.tokens, self.job.polish)

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

    def _first_kernels(self) -> Iterator[Kernel]:
        """Yield the default plans' kernels and the candidates, the roles by turns."""
        defaults = [self.ports.default_plan(tokens) for tokens in self.job.tokens]
        wanted = [
            [(role, config) for config in (*(plan.config(role) for plan in defaults), *self._spaces[role].configs)]
            for role in Role
        ]
        for kernels in itertools.zip_longest(*wanted):
            yield from (kernel for kernel in kernels if kernel is not None)

    def _await_first_kernels(self) -> None:
        """Wait for what is left of the first round; what takes too long is given up."""
        if not self._bench.await_promised(self._budget.compile_deadline()):
            self._cut_short("the budget cut the compiles short: the least promising candidates are left out")

    def _survey(self, counts: Sequence[int]) -> None:
        """Try a few candidates wherever the searches may have kernels compiled, and let them ask for these."""
        asking = [tokens for tokens in counts if any(self._pace.quota(role, tokens).kernels for role in Role)]
        deadline = None if self._is_recorded else self._pace.survey_deadline(asking)
        if deadline is None:
            return
        for place, tokens in enumerate(asking, start=1):
            if deadline.passed:
                return
            self._emit(SurveyStarted(tokens, place, len(asking)))
            if self.backend.open(tokens) is not None:
                continue  # it is opened once more in its turn, which says what is wrong
            for role in Role:
                race = self._surveyed[role, tokens] = Race(self._bench, role, tokens)
                race.enter(self._search(role, tokens, self._pace.quota(role, tokens)), deadline)
                self._remember(race)

    # one token count

    def _one_count(self, counts_left: list[int]) -> None:
        tokens = counts_left[0]
        # Opened before its time is counted: the first one waits for CUDA, its libraries and the weights.
        verdict = self.backend.open(tokens) or self._tune(tokens, self._pace.allow(counts_left))
        if isinstance(verdict, Failed):
            self._emit(TokenFailed(tokens, verdict.reason))
            return
        bound_us = self.backend.bound_us()
        self.ports.journal.record_bound(tokens, bound_us)
        if self.job.strict and (reason := distrusted(verdict.winner.measured)):
            self._refused.append(reason)
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
        # Where layers are recorded, a sum of kernels has no chance to be measured, and none to be believed before them.
        recorded = [plan for plan in self.backend.recorded_plans(tokens) if self._within.holds(plan)]
        entrants = recorded or [*plans, *preferred]
        verdict = self._within.explained(finals.run(list(dict.fromkeys(entrants)), preferred), default)
        self._pace.learn(allowance, self._budget.clock() - started_s, was_cut)
        return verdict

    def _raced_plans(self, tokens: int, allowance: Allowance) -> tuple[list[LayerPlan], bool]:
        """Return the finalists of both races, and whether one of these was cut short."""
        races = {role: self._surveyed.pop((role, tokens), None) or Race(self._bench, role, tokens) for role in Role}
        for role, deadline in ((Role.GATE_UP, allowance.gate_up_deadline), (Role.DOWN, allowance.down_deadline)):
            races[role].enter_late(deadline)
            self._remember(races[role])
            races[role].enter(self._search(role, tokens, self._pace.rest(role, tokens)), deadline)
        finish(list(races.values()), allowance.down_deadline)
        for race in races.values():
            self._remember(race)
        gate_up, down = (races[role].standings() for role in (Role.GATE_UP, Role.DOWN))
        routing_us: dict[int, float] = {}
        for block_m in block_ms(gate_up, down):
            routing = self._bench.routing(tokens, block_m)
            if isinstance(routing, Measured):
                routing_us[block_m] = routing.median_us
        self._bench.combine(tokens)  # the same for all plans: recorded for replays and reports
        cut = [role.value for role, race in races.items() if race.was_cut]
        if cut:
            self._cut_short(f"{tokens} tokens: the budget cut the race of {' and '.join(cut)} short")
        return [composed.plan for composed in compose(gate_up, down, routing_us)], bool(cut)

    def _remember(self, race: Race) -> None:
        """Tell all later searches what this one found: only that, so that a sweep which continues another asks alike."""
        ended = self._bench.ended(race.role, race.tokens)
        for config in (one for one in race.asked if one in ended):
            self._memory.log.record(race.role, race.tokens, config, ended[config])
        self._pace.asked[race.role, race.tokens] = len(race.asked)

    def _search(self, role: Role, tokens: int, quota: Quota) -> Strategy:
        terrain = self._memory.terrain(
            self._spaces[role],
            self._bench.at_hand(role),
            tokens,
            quota,
            seeds=[plan.config(role) for plan in (self.ports.default_plan(tokens), *self._memory.neighbours(tokens))],
        )
        return self.ports.strategy(terrain, self.job.seed)

    # after the last token count

    def _look_between(self) -> None:
        """Time plans between neighbouring entries: the faster neighbour serves, and where that loses too much, tune."""
        if self._is_recorded:
            return
        ladder = Ladder(bench=self._bench, default_plan=self.ports.default_plan)
        for gap in gaps(self._entries)[: self.job.probes]:
            if not self._pace.probe_fits(gap[1], len(ladder.plans(gap[1], self._entries))):
                self._cut_short("no time was left to look between all entries")
                return
            probe = ladder.probe(gap, self._entries)
            if isinstance(probe, Failed) or probe.loss is None:
                continue
            is_worth_it = probe.loss > max(WORTH_AN_ENTRY, self.job.noise)
            self._probes.append(GapProbed(probe.tokens, probe.serving, probe.loss, is_worth_it))
            self._emit(self._probes[-1])
            if is_worth_it:
                self._pace.admit(probe.tokens)
                self._one_count([probe.tokens])
            else:
                ranged = with_ranges(self._entries)
                self._entries = with_switch(ranged, probe.lower, probe.upper, probe.last_of_lower)

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
