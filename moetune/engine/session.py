"""The life of a sweep: compile everything once, then race, compose, decide and write at every token count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moetune.engine.backend import Backend, Ceilings, LayerFigures
from moetune.engine.bench import Bench, Journal, Key
from moetune.engine.budget import Budget, Deadline
from moetune.engine.compose import block_ms, compose
from moetune.engine.entries import entry_of, with_figures, with_ranges
from moetune.engine.events import (
    CountersStarted,
    Emit,
    SpaceReady,
    TableWritten,
    TokenDone,
    TokenFailed,
    TokenStarted,
    Warned,
)
from moetune.engine.finals import Finals, Verdict
from moetune.engine.memory import Memory
from moetune.engine.race import Race, Standing
from moetune.engine.schedule import ANCHOR_COST, anchors, cost_us, order
from moetune.errors import RunError
from moetune.outcome import Failed, FailureKind, Measured, Stage, Subject, Trial
from moetune.space import Space, candidates, recorded_space
from moetune.strategies.base import StrategyFactory, Terrain
from moetune_kernels.config import Role
from moetune_kernels.plan import LayerPlan
from moetune_kernels.table import Entry

RACES_SHARE = (0.4, 0.75)  # of a token count's time: the end of gate-up's race, and of down's within what is left
COUNTERS_LIMIT_S = 120.0  # a profiler that has not answered by then is stuck
COUNTERS_S = 8.0  # below this the profiler cannot even start and load the weights
QUICK_S = 0.3  # with less than this for a token count there is no race, only the default and the neighbours' winners


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to tune and how hard.

    Args:
        tokens: token counts, each at least 1.
        budget: wall time, running.
        kernels: how many kernels the first round compiles, both roles together.
        polish: how many neighbours of winners are compiled afterwards, both roles together.
        seed: of the strategies that draw.
    """

    tokens: tuple[int, ...]
    budget: Budget
    kernels: int
    polish: int
    seed: int = 0


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

    def __post_init__(self) -> None:
        self._emit = self.ports.emit
        self._bench = Bench(self.backend, self.ports.journal, self._emit, dict(self.ports.known))

    def run(self) -> SessionResult:
        """Run the sweep.

        Raises:
            RunError: no token count has a plan that runs and is right.
        """
        self._ceilings = self.backend.ceilings()
        self.ports.journal.record_ceilings(self._ceilings.bytes_per_s, self._ceilings.flops)
        self._spaces = {role: self._space(role) for role in Role}
        self._compile()
        counts = order(self.job.tokens)
        for place, tokens in enumerate(counts, start=1):
            self._emit(TokenStarted(tokens, place, len(counts)))
            self._one_count(tokens, self._share_of(counts[place - 1 :]))
        if not self._entries:
            reasons = ", ".join(f"{count} {kind.value}" for kind, count in self._bench.failures.most_common())
            raise RunError(f"no token count has a plan that runs and is right ({reasons}); see `moetune doctor`")
        self._count_winners()
        return SessionResult(
            entries=with_ranges(self._entries),
            table_path=self._write(),
            trials=self._bench.trials,
            failures=self._bench.failures,
            removed=sum((space.removed for space in self._spaces.values()), Counter[str]()),
            stopped_early=self.stopped_early,
        )

    # before the first token count

    def _space(self, role: Role) -> Space:
        shape, device, tokens = self.backend.shape, self.backend.device, self.job.tokens
        recorded = self.backend.recorded(role)
        if recorded is None:
            space = candidates(shape, device, role, tokens, limit=max(self.job.kernels // len(Role), 1))
        else:
            space = recorded_space(shape, device, role, tokens, recorded)
        self._emit(SpaceReady(role, len(space.configs), space.legal, space.removed))
        return space

    def _compile(self) -> None:
        """Compile the default plans' kernels and the candidates."""
        defaults = [self.ports.default_plan(tokens) for tokens in self.job.tokens]
        wanted = {role: [*(plan.config(role) for plan in defaults), *self._spaces[role].configs] for role in Role}
        if not self._bench.compile(wanted, self.job.budget.compile_deadline()):
            self._cut_short("the budget cut the compiles short: the least promising candidates are left out")

    def _share_of(self, counts_left: list[int]) -> Deadline:
        spread = anchors(self.job.tokens)
        costs = [
            cost_us(self.backend.shape, tokens, self._ceilings) * (ANCHOR_COST if tokens in spread else 1.0)
            for tokens in counts_left
        ]
        return self.job.budget.share(costs)

    # one token count

    def _one_count(self, tokens: int, deadline: Deadline) -> None:
        closed = self.backend.open(tokens)
        verdict = closed or self._tune(tokens, deadline)
        if isinstance(verdict, Failed):
            self._emit(TokenFailed(tokens, verdict.reason))
            return
        bound_us = self.backend.bound_us()
        self.ports.journal.record_bound(tokens, bound_us)
        entry = entry_of(tokens, verdict, bound_us, self._bench.compiled)
        self._entries[tokens] = entry
        self._verdicts[tokens] = verdict
        self._memory.winners[tokens] = verdict.winner.plan
        self._write()
        self._emit(TokenDone(with_ranges(self._entries)[tokens]))

    def _tune(self, tokens: int, deadline: Deadline) -> Verdict | Failed:
        preferred = self._memory.neighbours(tokens)
        plans: list[LayerPlan] = []
        if deadline.left_s > QUICK_S or not preferred:
            plans = self._raced_plans(tokens, deadline)
        else:
            self._cut_short(
                f"{tokens} tokens had no time for a race: the default and neighbouring winners were compared"
            )
        finals = Finals(self._bench, tokens, self.ports.default_plan(tokens), deadline)
        entrants = dict.fromkeys([*plans, *preferred, *self.backend.recorded_plans(tokens)])
        return finals.run(list(entrants), preferred)

    def _raced_plans(self, tokens: int, deadline: Deadline) -> list[LayerPlan]:
        finishers = {
            role: self._race(role, tokens, deadline.after(share)) for role, share in zip(Role, RACES_SHARE, strict=True)
        }
        gate_up, down = finishers[Role.GATE_UP], finishers[Role.DOWN]
        routing_us: dict[int, float] = {}
        for block_m in block_ms(gate_up, down):
            routing = self._bench.routing(tokens, block_m)
            if isinstance(routing, Measured):
                routing_us[block_m] = routing.median_us
        self._bench.combine(tokens)  # the same for all plans: recorded for replays and reports
        return [composed.plan for composed in compose(gate_up, down, routing_us)]

    def _race(self, role: Role, tokens: int, deadline: Deadline) -> list[Standing]:
        space = self._spaces[role]
        compiled = [config for compiled_role, config in self._bench.compiled if compiled_role is role]
        terrain = Terrain(
            coarse=tuple(self._memory.pool(space, compiled, tokens)),
            neighbours=lambda config: space.neighbours(config, tokens),
            polish=self._polish_of(tokens),
        )
        race = Race(self._bench, role, tokens, deadline)
        standings = race.run(self.ports.strategy(terrain, self.job.seed))
        self._memory.ratios[role, tokens] = race.ratios()
        if race.was_cut:
            self._cut_short(f"the race of {role.value} at {tokens} tokens was cut short by the budget")
        return standings

    def _polish_of(self, tokens: int) -> int:
        spread = anchors(self.job.tokens)
        return self.job.polish // (len(Role) * len(spread)) if tokens in spread else 0

    # after the last token count

    def _count_winners(self) -> None:
        """Read hardware counters for the winners, where machine and budget allow it; else figures stay as they are."""
        if any(space.closed for space in self._spaces.values()):
            return  # a recording holds what was counted
        if self.job.budget.remaining_s < COUNTERS_S:
            self._emit(Warned("no time was left for hardware counters: figures are estimates"))
            return
        self._emit(CountersStarted(len(self._entries)))
        limit_s = min(self.job.budget.remaining_s, COUNTERS_LIMIT_S)
        winners = {tokens: verdict.winner.plan for tokens, verdict in sorted(self._verdicts.items())}
        refused: Counter[str] = Counter()
        for tokens, figures in self.backend.counters(winners, limit_s).items():
            if isinstance(figures, Failed):
                refused[figures.reason] += 1
            else:
                self._entries[tokens] = with_figures(self._entries[tokens], figures)
                self._keep_figures(tokens, figures)
        for reason, count in refused.items():
            self._emit(Warned(f"no hardware counters for {count} of {len(winners)} entries: {reason}"))

    def _keep_figures(self, tokens: int, figures: LayerFigures) -> None:
        """Write the winner's final down again, now with counted figures, so that recordings and reports have them."""
        winner = self._verdicts[tokens].winner
        measured = Measured(
            median_us=winner.measured.median_us,
            spread_us=winner.measured.spread_us,
            samples=winner.measured.samples,
            flops_per_byte=figures.flops_per_byte,
            bandwidth_gbps=figures.bandwidth_gbps,
            issue_efficiency=figures.issue_efficiency,
            source=winner.measured.source,
        )
        self._bench.end(
            Trial(
                subject=Subject.LAYER,
                tokens=tokens,
                choice=winner.plan,
                stage=Stage.FINAL,
                outcome=measured,
                verified=True,
            )
        )

    def _write(self) -> Path:
        entries = with_ranges(self._entries)
        path = self.ports.write_table(entries, self._ceilings)
        self._emit(TableWritten(path, len(entries)))
        return path

    def _cut_short(self, text: str) -> None:
        self.stopped_early = True
        self._emit(Warned(text))
