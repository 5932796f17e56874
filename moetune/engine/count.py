"""One token count on one GPU: surveyed, tuned, or timed between two entries; and what all counts of a sweep share.

Whoever works here is a worker: one bench, whose backend is one GPU. Nothing here locks: where workers are several, only
one of them runs at a time, and another goes on while a backend is asked (:mod:`moetune.engine.workers`). So whatever is
read here before such a call may be older than what is true after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from moetune.engine.backend import Ceilings
from moetune.engine.bench import Bench
from moetune.engine.budget import Allowance, Budget, Deadline
from moetune.engine.compose import block_ms, compose
from moetune.engine.decide import distrusted
from moetune.engine.entrance import Entrance, by_turns
from moetune.engine.entries import entry_of, with_ranges, with_switch
from moetune.engine.events import GapProbed, TableWritten, TokenDone, TokenFailed, TokenRefused, Warned
from moetune.engine.finals import Finals, Verdict
from moetune.engine.job import Job, Ports
from moetune.engine.ladder import WORTH_AN_ENTRY, Ladder
from moetune.engine.memory import Memory
from moetune.engine.pace import Pace
from moetune.engine.race import Race, finish
from moetune.engine.schedule import Quota
from moetune.engine.within import Within
from moetune.engine.workers import NotHereError
from moetune.outcome import Failed, Measured
from moetune.space import Space
from moetune.strategies.base import Strategy
from moetune_kernels.config import Role
from moetune_kernels.plan import LayerPlan
from moetune_kernels.table import Entry


@dataclass(kw_only=True)
class Findings:
    """What all workers of a sweep go by, and what they found.

    Args:
        job: what to tune and how hard.
        ports: the world beside the GPUs.
        spaces: the candidates of each role.
        within: the user's limits.
        budget: wall time; no limit in a replay.
        ceilings: what the first GPU reached.
        pace: what each count may spend.
        entries: the table so far, by token count.
        verdicts: the winner of each entry.
        refused: why ``strict`` wrote no entry.
        surveyed: races that were begun, by role and token count.
        probes: what was timed between entries.
        left_out: counts that there was no time for.
        stopped_early: whether the budget cut something.
        no_time_between: whether it ended the look between entries.
    """

    job: Job
    ports: Ports
    spaces: Mapping[Role, Space]
    within: Within
    budget: Budget
    ceilings: Ceilings
    pace: Pace
    memory: Memory = field(default_factory=Memory)
    entries: dict[int, Entry] = field(default_factory=dict[int, Entry])
    verdicts: dict[int, Verdict] = field(default_factory=dict[int, Verdict])
    refused: list[str] = field(default_factory=list[str])
    surveyed: dict[tuple[Role, int], Race] = field(default_factory=dict[tuple[Role, int], Race])
    probes: list[GapProbed] = field(default_factory=list[GapProbed])
    left_out: list[int] = field(default_factory=list[int])
    stopped_early: bool = False
    no_time_between: bool = False

    def write(self) -> Path:
        """Write the entries so far and return the file."""
        entries = with_ranges(self.entries)
        path = self.ports.write_table(entries, self.ceilings)
        self.ports.emit(TableWritten(path, len(entries)))
        return path

    def cut_short(self, text: str) -> None:
        """Say what the budget cut."""
        self.stopped_early = True
        self.ports.emit(Warned(text))


@dataclass(frozen=True, slots=True)
class CountTuner:
    """One worker with a token count in hand.

    Args:
        bench: of the worker's GPU.
        findings: what it shares with the other workers.
    """

    bench: Bench
    findings: Findings

    def survey(self, tokens: int, deadline: Deadline) -> None:
        """Try a few candidates, and let the searches ask for the kernels that they want compiled.

        Raises:
            NotHereError: the count cannot be opened on this GPU.
        """
        found = self.findings
        self._open(tokens)  # a count that cannot be is opened once more in its turn, which says what is wrong
        races = {role: Race(self.bench, role, tokens) for role in Role}
        found.surveyed.update({(role, tokens): race for role, race in races.items()})
        with ExitStack() as held:
            quotas = {role: held.enter_context(found.pace.held(role, tokens)) for role in Role}
            by_turns(races[role].surveying(self._search(role, tokens, quotas[role]), deadline) for role in Role)
        for race in races.values():
            self._remember(race)

    def tune(self, tokens: int, waiting: Callable[[], Sequence[int]]) -> None:
        """Find the plan of one token count and write the table with it.

        Args:
            tokens: the count.
            waiting: returns the counts that no worker has begun.

        Raises:
            NotHereError: it cannot be opened on this GPU.
        """
        found, emit = self.findings, self.findings.ports.emit
        self._open(tokens)  # before its time is counted: the first one waits for CUDA, its libraries and the weights
        verdict = self._verdict(tokens, found.pace.allow([tokens, *waiting()], self.bench.loaded))
        if isinstance(verdict, Failed):
            emit(TokenFailed(tokens, verdict.reason))
            return
        bound_us = self.bench.backend.bound_us()
        found.ports.journal.record_bound(tokens, bound_us)
        if found.job.strict and (reason := distrusted(verdict.winner.measured)):
            found.refused.append(reason)
            emit(TokenRefused(tokens, reason))
            return
        cost = found.within.cost(verdict, found.ports.default_plan(tokens))
        if cost is not None:
            emit(Warned(f"{tokens} tokens: {cost}"))
        found.entries[tokens] = entry_of(tokens, verdict, bound_us, self.bench.compiled)
        found.verdicts[tokens] = verdict
        found.memory.winners[tokens] = verdict.winner.plan
        found.write()
        emit(TokenDone(with_ranges(found.entries)[tokens]))

    def look_between(self, gap: tuple[int, int, int]) -> None:
        """Time plans between two neighbouring entries: the faster neighbour serves; where that loses too much, tune."""
        found = self.findings
        ladder = Ladder(bench=self.bench, default_plan=found.ports.default_plan)
        if found.no_time_between:
            return
        if not found.pace.probe_fits(gap[1], len(ladder.plans(gap[1], found.entries))):
            found.no_time_between = True
            found.cut_short("no time was left to look between all entries")
            return
        probe = ladder.probe(gap, dict(found.entries))
        if isinstance(probe, Failed) or probe.loss is None:
            return
        is_worth_it = probe.loss > max(WORTH_AN_ENTRY, found.job.noise)
        probed = GapProbed(probe.tokens, probe.serving, probe.loss, is_worth_it)
        found.probes.append(probed)
        found.ports.emit(probed)
        if is_worth_it:
            found.pace.admit(probe.tokens)
            try:
                self.tune(probe.tokens, waiting=list[int])
            except NotHereError as error:
                found.ports.emit(TokenFailed(probe.tokens, error.reason))
        else:
            ranged = with_ranges(found.entries)
            found.entries = with_switch(ranged, probe.lower, probe.upper, probe.last_of_lower)

    def _open(self, tokens: int) -> None:
        failed = self.bench.backend.open(tokens)
        if failed is not None:
            raise NotHereError(failed.reason)

    def _verdict(self, tokens: int, allowance: Allowance) -> Verdict | Failed:
        found, started_s, was_cut = self.findings, self.findings.budget.clock(), False
        preferred = found.memory.neighbours(tokens)
        plans: list[LayerPlan] = []
        if allowance.races or not preferred:
            plans, was_cut = self._raced_plans(tokens, allowance)
        else:
            was_cut = True
            found.cut_short(
                f"{tokens} tokens had no time for a race: the default and neighbouring winners were compared"
            )
        default, holds = found.ports.default_plan(tokens), found.within.holds
        finals = Finals(self.bench, tokens, default, allowance.deadline, found.job.noise, holds)
        # Where layers are recorded, a sum of kernels has no chance to be measured, and none to be believed before them.
        recorded = [plan for plan in self.bench.backend.recorded_plans(tokens) if holds(plan)]
        entrants = recorded or [*plans, *preferred]
        verdict = found.within.explained(finals.run(list(dict.fromkeys(entrants)), preferred), default)
        found.pace.learn(allowance, found.budget.clock() - started_s, was_cut)
        return verdict

    def _raced_plans(self, tokens: int, allowance: Allowance) -> tuple[list[LayerPlan], bool]:
        """Return the finalists of both races, and whether one of these was cut short."""
        races = {role: self._race(role, tokens) for role in Role}
        if allowance.is_scarce:  # one after the other: gate-up, which comes first, must leave down its time
            for role, deadline in ((Role.GATE_UP, allowance.gate_up_deadline), (Role.DOWN, allowance.down_deadline)):
                self._hurry(races[role], deadline)
        else:
            by_turns([self._entering(race, allowance.down_deadline) for race in races.values()])
        finish(list(races.values()), allowance.down_deadline)
        for race in races.values():
            self._remember(race)
        gate_up, down = (races[role].standings() for role in (Role.GATE_UP, Role.DOWN))
        routing_us: dict[int, float] = {}
        for block_m in block_ms(gate_up, down):
            routing = self.bench.routing(tokens, block_m)
            if isinstance(routing, Measured):
                routing_us[block_m] = routing.median_us
        self.bench.combine(tokens)  # the same for all plans: recorded for replays and reports
        cut = [role.value for role, race in races.items() if race.was_cut]
        if cut:
            self.findings.cut_short(f"{tokens} tokens: the budget cut the race of {' and '.join(cut)} short")
        return [composed.plan for composed in compose(gate_up, down, routing_us)], bool(cut)

    def _entering(self, race: Race, deadline: Deadline) -> Entrance:
        """Time what the survey left, and return the entry of all that a search asks for besides."""
        race.enter_late(deadline)
        self._remember(race)
        quota = self.findings.pace.rest(race.role, race.tokens)
        return race.entering(self._search(race.role, race.tokens, quota), deadline)

    def _hurry(self, race: Race, deadline: Deadline) -> None:
        """Let in what is compiled of what the survey left and the search asks for, and wait for nothing.

        A search may still have kernels compiled: other token counts profit from those that come too late for this one.
        """
        quota = self.findings.pace.wishes(race.role, race.tokens)
        race.hurry(self._search(race.role, race.tokens, quota), deadline)

    def _race(self, role: Role, tokens: int) -> Race:
        """Return the race that a survey began, whichever worker that was, or a new one."""
        race = self.findings.surveyed.pop((role, tokens), None)
        if race is None:
            return Race(self.bench, role, tokens)
        race.bench, race.was_cut = self.bench, False  # what cut the survey leaves this pass whole
        return race

    def _remember(self, race: Race) -> None:
        """Tell all later searches what this one found: only that, so that a sweep which continues another asks alike."""
        ended = self.bench.ended(race.role, race.tokens)
        for config in (one for one in race.asked if one in ended):
            self.findings.memory.log.record(race.role, race.tokens, config, ended[config])
        self.findings.pace.asked[race.role, race.tokens] = len(race.asked)

    def _search(self, role: Role, tokens: int, quota: Quota) -> Strategy:
        found = self.findings
        plans = (found.ports.default_plan(tokens), *found.memory.neighbours(tokens))
        seeds = [plan.config(role) for plan in plans]
        terrain = found.memory.terrain(found.spaces[role], self.bench.at_hand(role), tokens, quota, seeds)
        return found.ports.strategy(terrain, found.job.seed)
