"""The life of a sweep: survey the token counts that want kernels of their own, then tune every count and write it.

Compile processes work beside all of it. A survey gives candidates a few samples and asks for the kernels that look good
from there; while these compile, the GPU surveys the next count. When the counts are tuned, their kernels are ready.
Every pass is a list of token counts for whichever worker is free (:mod:`moetune.engine.workers`): one per GPU.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from moetune.engine.backend import Backend, Kernel
from moetune.engine.bench import Bench
from moetune.engine.budget import Budget
from moetune.engine.costs import Costs
from moetune.engine.count import CountTuner, Findings
from moetune.engine.counting import count_winners
from moetune.engine.entries import with_figures, with_ranges
from moetune.engine.events import CountersStarted, SpaceReady, SurveyStarted, TokenFailed, TokenStarted, Warned
from moetune.engine.fitting import Fitting
from moetune.engine.job import Job, Ports, SessionResult
from moetune.engine.ladder import gaps
from moetune.engine.pace import Pace
from moetune.engine.schedule import order
from moetune.engine.within import Within
from moetune.engine.workers import Waiting, Workers, workers_of
from moetune.errors import RunError
from moetune.space import Space, candidates, counts_text, recorded_space, require_something
from moetune_kernels.config import MoEKernelConfig, Role

__all__ = ["Job", "Ports", "Session", "SessionResult"]

READY_COUNTS = 5  # the last ones, during which the profiler loads: that takes seconds, as several short counts do
COUNTERS_LIMIT_S = 120.0  # a profiler that has not answered by then is stuck
Gap = tuple[int, int, int]


@dataclass
class Session:
    """One sweep; ``run`` it once.

    Args:
        backend: the first GPU, or a recording. Its compilers work for all.
        job: what to tune and how hard.
        ports: the world beside the backends.
        others: further GPUs of the same model, which share the work; none in a replay.
        gpus: what to call the GPUs, the first one's first.
    """

    backend: Backend
    job: Job
    ports: Ports
    others: Sequence[Backend] = ()
    gpus: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._emit = self.ports.emit
        self._bench = Bench(self.backend, self.ports.journal, self._emit, dict(self.ports.known))

    def run(self) -> SessionResult:
        """Run the sweep.

        Raises:
            RunError: no token count has a plan that runs and is right, or no GPU gives answers any more.
            UsageError: the limits leave nothing to try.
        """
        self._choose()
        with workers_of(self._bench, self.others, self.gpus) as workers:
            found = self._found = self._prepare(workers)
            counts = order(self.job.tokens)
            self._survey(workers, counts)
            self._await_default_kernels()
            self._tune(workers, counts)
            if not found.entries:
                raise self._why_nothing()
            self._look_between(workers)
            self._count_winners(workers.first)
        return SessionResult(
            entries=with_ranges(found.entries),
            table_path=found.write(),
            trials=self._bench.tally.trials,
            failures=self._bench.tally.failures,
            removed=sum((space.removed + space.outside for space in self._spaces.values()), Counter[str]()),
            stopped_early=found.stopped_early,
            probes=tuple(found.probes),
        )

    def _why_nothing(self) -> RunError:
        refused = self._found.refused
        if refused:
            return RunError(f"no entry is worth keeping: {refused[0]}; cool the GPU, or leave --strict away")
        failures = self._bench.tally.failures.most_common()
        counted = ", ".join(f"{count} {kind.value}" for kind, count in failures)
        reasons = f" ({counted})" if counted else ""  # none where no count could be opened: each has said why
        inside = f" inside {self.job.limits.text}" if self.job.limits.any else ""
        return RunError(f"no token count has a plan{inside} that runs and is right{reasons}; see `moetune doctor`")

    # before the first token count

    def _choose(self) -> None:
        """Choose the candidates."""
        self._spaces = {role: self._space(role) for role in Role}
        require_something(self._spaces, self.job.tokens)
        self._within = Within(self._spaces, self._bench)
        self._bench.why_outside = self._within.why_outside
        self._budget = Budget(None) if self._is_recorded else self.job.budget  # nothing to wait for in a replay

    def _prepare(self, workers: Workers) -> Findings:
        """Have the candidates compiled, while the GPU tells its limits."""
        self._bench.request(self._first_kernels())
        self._bench.promised.update(self._bench.under_way)
        if not self._is_recorded:
            for space in self._spaces.values():  # every search needs these, and the GPU's process still imports
                space.pool(self.job.tokens[0])
        ceilings = workers.ceilings()
        self.ports.journal.record_ceilings(ceilings.bytes_per_s, ceilings.flops)
        is_cut = (self._is_recorded or self.job.limits.any) and self._is_compiling_cut(self._bench.promised)
        if self.job.limits.any:  # what is inside them, only the compiler's reports tell
            fitting = Fitting(self._within, self.job.tokens, self._budget.compile_deadline())
            is_cut = not fitting.run(self._emit) or is_cut
        costs = Costs(self.backend.shape, ceilings)
        return Findings(
            job=self.job,
            ports=self.ports,
            spaces=self._spaces,
            within=self._within,
            budget=self._budget,
            ceilings=ceilings,
            pace=Pace(
                self._budget,
                costs,
                self._bench,
                self._spaces,
                self.job.tokens,
                self.job.polish,
                lambda: workers.count,
            ),
            stopped_early=is_cut,
        )

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
        wanted = [
            [(role, config) for config in (*self._default_configs(role), *self._spaces[role].configs)] for role in Role
        ]
        for kernels in itertools.zip_longest(*wanted):
            yield from (kernel for kernel in kernels if kernel is not None)

    def _await_default_kernels(self) -> None:
        """Wait for the default plans' kernels, which no race waits for; for others those wait that ask for them."""
        if self._is_compiling_cut({(role, config) for role in Role for config in self._default_configs(role)}):
            self._found.stopped_early = True

    def _default_configs(self, role: Role) -> list[MoEKernelConfig]:
        return [self.ports.default_plan(tokens).config(role) for tokens in self.job.tokens]

    def _is_compiling_cut(self, kernels: Collection[Kernel]) -> bool:
        """Wait for ``kernels`` of the first round; where that takes too long what is left of it is given up, and said."""
        if self._bench.await_all(kernels, self._budget.compile_deadline()):
            return False
        self._emit(Warned("the budget cut the compiles short: the least promising candidates are left out"))
        return True

    # the passes: what a worker does with one token count is CountTuner's

    def _survey(self, workers: Workers, counts: Sequence[int]) -> None:
        """Try a few candidates wherever the searches may have kernels compiled, and let them ask for these."""
        pace = self._found.pace
        asking = [tokens for tokens in counts if any(pace.quota(role, tokens).kernels for role in Role)]
        deadline = None if self._is_recorded else pace.survey_deadline(asking)
        if deadline is None:
            return

        def survey(bench: Bench, tokens: int, _: Waiting[int]) -> None:
            if not deadline.passed:
                self._emit(SurveyStarted(tokens, asking.index(tokens) + 1, len(asking)))
                CountTuner(bench, self._found).survey(tokens, deadline)

        workers.each(asking, survey, lambda _, __: None)

    def _tune(self, workers: Workers, counts: Sequence[int]) -> None:
        def tune(bench: Bench, tokens: int, waiting: Waiting[int]) -> None:
            if not self._has_time_for(tokens):
                self._found.left_out.append(tokens)
                return
            place = counts.index(tokens) + 1
            self._emit(TokenStarted(tokens, place, len(counts)))
            if len(counts) - place < READY_COUNTS and self._found.pace.counters_fit(len(counts)):
                workers.first.backend.prepare_counters()
            CountTuner(bench, self._found).tune(tokens, waiting)

        def give_up(tokens: int, reason: str) -> None:
            self._emit(TokenFailed(tokens, reason))

        workers.each(counts, tune, give_up)
        left_out = sorted(self._found.left_out)
        if left_out:
            self._found.cut_short(f"no time was left for {counts_text(left_out)} tokens, which get no new entry")

    def _has_time_for(self, tokens: int) -> bool:
        """Whether a count is begun: the first one always is, so that there is a table."""
        found = self._found
        return not found.entries or found.pace.count_fits(tokens, has_neighbours=bool(found.memory.neighbours(tokens)))

    def _look_between(self, workers: Workers) -> None:
        """Time plans between neighbouring entries, the widest gaps first."""

        def look(bench: Bench, gap: Gap, _: Waiting[Gap]) -> None:
            CountTuner(bench, self._found).look_between(gap)

        if not self._is_recorded:
            workers.each(gaps(self._found.entries)[: self.job.probes], look, lambda _, __: None)

    # after the last token count

    def _count_winners(self, bench: Bench) -> None:
        """Read hardware counters for the winners, where machine and budget allow it; else figures stay as they are."""
        found = self._found
        if self._is_recorded:
            return  # a recording holds what was counted
        if not found.pace.counters_fit(len(found.entries)):
            self._emit(Warned("no time was left for hardware counters: figures are estimates"))
            return
        self._emit(CountersStarted(len(found.entries)))
        limit_s = min(self._budget.remaining_s, COUNTERS_LIMIT_S)
        winners = {tokens: verdict.winner for tokens, verdict in sorted(found.verdicts.items())}
        for tokens, figures in count_winners(bench, winners, limit_s).items():
            found.entries[tokens] = with_figures(found.entries[tokens], figures)
