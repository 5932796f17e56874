"""Where trials happen: asks the backend, remembers every end, writes it to the journal, tells the audience."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Protocol

from moetune.engine.backend import WAIT_S, Backend, Entered, Kernel
from moetune.engine.budget import Deadline
from moetune.engine.events import CompileProgress, Emit, TrialEnded
from moetune.engine.gate import Gate
from moetune.outcome import (
    EVERY_COUNT,
    SUBJECT_OF,
    Compiled,
    Failed,
    FailureKind,
    Measured,
    Outcome,
    Stage,
    Subject,
    Trial,
)
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.plan import LayerPlan

# More spilled registers than this lost every race seen; a few can still win, so zero is no rule.
MAX_SPILLS = 16

ROLE_OF = {subject: role for role, subject in SUBJECT_OF.items()}

Choice = MoEKernelConfig | LayerPlan | int
Key = tuple[Subject, int, Choice]
TimeKernels = Callable[[Role, Sequence[MoEKernelConfig], int], Generator[Outcome]]


class Journal(Protocol):
    """Where ended trials are kept; each call returns when they are safe."""

    def record(self, trial: Trial) -> None:
        """Keep one trial."""
        ...

    def record_bound(self, tokens: int, bound_us: float) -> None:
        """Keep the physical bound of a token count."""
        ...

    def record_ceilings(self, bytes_per_s: float, flops: float) -> None:
        """Keep what the device reached."""
        ...


@dataclass
class Tally:
    """What a sweep counts: trials that ended, how they failed, compiles that ended, and those that left no kernel."""

    trials: int = 0
    failures: Counter[FailureKind] = field(default_factory=Counter[FailureKind])
    compiles: int = 0
    dropped: int = 0


@dataclass
class Bench:
    """One backend and everything that it and those :meth:`beside` it answered in this sweep and in earlier ones.

    Args:
        backend: who answers.
        journal: where ended trials go.
        emit: who is told.
        screened: latest screening of every choice; starts with what earlier runs left, finals that crashed included.
        compiled: what the compiler reported of every kernel that may run.
        loaded: kernels that this backend launched at least once.
        under_way: kernels that the compiler has, in the order in which it was given them.
        promised: kernels of the first round: a search may count on them, because they are compiled soon.
        wished: kernels that a search asked for: of these none is given up for want of time to compile it.
        requested: every kernel that was asked for in this sweep, in that order.
        why_outside: which of the user's limits removes a kernel from the race; what is outside is compiled and timed
            only as part of the default plan, and no trial says so, since another sweep has other limits.
        tally: what is counted.
    """

    backend: Backend
    journal: Journal
    emit: Emit
    screened: dict[Key, Trial] = field(default_factory=dict[Key, Trial])
    compiled: dict[Kernel, Compiled] = field(default_factory=dict[Kernel, Compiled])
    loaded: set[Kernel] = field(default_factory=set[Kernel])
    under_way: dict[Kernel, None] = field(default_factory=dict[Kernel, None])
    promised: set[Kernel] = field(default_factory=set[Kernel])
    wished: set[Kernel] = field(default_factory=set[Kernel])
    requested: dict[Kernel, None] = field(default_factory=dict[Kernel, None])
    why_outside: Callable[[Role, MoEKernelConfig], str | None] = lambda _, __: None
    tally: Tally = field(default_factory=Tally)

    def beside(self, backend: Backend) -> Bench:
        """Return a bench of another backend that shares all that is known: what one learns, the other knows at once."""
        return replace(self, backend=backend, loaded=set())

    def inside(self, role: Role) -> list[MoEKernelConfig]:
        """Return the compiled kernels of a role that keep to the user's limits."""
        return [config for one, config in self.compiled if one is role and self.why_outside(role, config) is None]

    def at_hand(self, role: Role) -> list[MoEKernelConfig]:
        """Return every kernel of a role that somebody asked for, compiled or not, inside the limits as far as is known.

        Those that failed too: what a search is offered must not depend on how far the compiler is.
        """
        asked = (config for one, config in self.requested if one is role)
        return [config for config in asked if self.why_outside(role, config) is None]

    def end(self, trial: Trial) -> Outcome:
        """Write one ended trial down and return its outcome."""
        self.tally.trials += 1
        if isinstance(trial.outcome, Failed):
            self.tally.failures[trial.outcome.kind] += 1
        if trial.stage is Stage.SCREEN:
            self.screened[trial.subject, trial.tokens, trial.choice] = trial
        self.journal.record(trial)
        self.emit(TrialEnded(trial))
        return trial.outcome

    # compiling, beside everything else

    def wish(self, wanted: Iterable[Kernel]) -> None:
        """Have kernels compiled that a search wants to see timed."""
        kernels = list(wanted)
        self.wished.update(kernels)
        self.request(kernels)

    def request(self, wanted: Iterable[Kernel]) -> None:
        """Have kernels compiled that are not, the first ones first and all of them before whatever waits already."""
        kernels = dict.fromkeys(wanted)
        self.requested.update(kernels)
        asked = [kernel for kernel in kernels if self.is_wanted(kernel)]
        if not asked:
            return
        waiting = dict.fromkeys(self.backend.withdraw())
        fresh = [kernel for kernel in asked if kernel not in self.under_way]
        self.backend.submit(dict.fromkeys((*(one for one in asked if one in waiting or one in fresh), *waiting)))
        self.under_way.update(dict.fromkeys(fresh))
        self._emit_progress()

    def is_wanted(self, kernel: Kernel) -> bool:
        """Whether nobody knows yet how the kernel's compile ends."""
        role, config = kernel
        return kernel not in self.compiled and (SUBJECT_OF[role], EVERY_COUNT, config) not in self.screened

    def collect(self, wait_s: float = 0.0) -> None:
        """Take in what the compiler ended; waits ``wait_s`` at most where that is nothing."""
        found = self.backend.ended(wait_s if self.under_way else 0.0)
        for (role, config), result in found:
            self.under_way.pop((role, config), None)
            self.tally.compiles += 1
            self.tally.dropped += not self._take(role, config, result)
        if found:
            self._emit_progress()

    def await_any(self, kernels: Iterable[Kernel], deadline: Deadline) -> bool:
        """Wait until one of ``kernels`` is no longer under way; False where there was no time for that."""
        waited = list(kernels)
        self.collect()
        while all(kernel in self.under_way for kernel in waited):
            if deadline.passed:
                return False
            self.collect(min(WAIT_S, max(deadline.left_s, 0.0)))
        return True

    def await_promised(self, deadline: Deadline) -> bool:
        """Wait for the first round; False when the deadline passed, and what no compiler has begun of it is given up."""
        return self.await_all(self.promised, deadline)

    def await_all(self, kernels: Collection[Kernel], deadline: Deadline) -> bool:
        """Wait for all of ``kernels``; False when the deadline passed, and :meth:`give_up_compiling` was called."""
        self.collect()
        while any(kernel in self.under_way for kernel in kernels):
            if deadline.passed:
                self.give_up_compiling()
                return False
            self.collect(min(WAIT_S, max(deadline.left_s, 0.0)))
        return True

    def give_up_compiling(self) -> None:
        """Take back what no compiler has begun and no search asked for: the end of the first round, which promises least."""
        waiting = dict.fromkeys(self.backend.withdraw())
        self.backend.submit([kernel for kernel in waiting if kernel in self.wished])
        for kernel in waiting.keys() - self.wished:
            del self.under_way[kernel]
            del self.requested[kernel]
        self._emit_progress()

    def _emit_progress(self) -> None:
        ended = self.tally.compiles
        self.emit(CompileProgress(ended, ended + len(self.under_way), self.tally.dropped))

    def _take(self, role: Role, config: MoEKernelConfig, result: Compiled | Failed) -> bool:
        if isinstance(result, Compiled) and result.spills <= MAX_SPILLS:
            self.compiled[role, config] = result
            return True
        compiled = result if isinstance(result, Compiled) else None
        failed = result if isinstance(result, Failed) else None
        if compiled is not None:
            failed = Failed(
                FailureKind.RESOURCES,
                f"spills {compiled.spills} registers (configs that spill more than {MAX_SPILLS} are not raced)",
            )
        assert failed is not None
        self.end(self._screening(role, EVERY_COUNT, config, failed, compiled))
        return False

    def enter(self, role: Role, tokens: int, configs: Sequence[MoEKernelConfig], gate: Gate) -> Generator[Outcome]:
        """Let configs into the race: the first launch of each, then a few samples unless that was hopeless.

        As all that follow: yields an outcome for each in their order, and the next is timed from then on; close it where no
        more are wanted.
        """
        settled = {config: end for config in configs if (end := self._settled(role, tokens, config)) is not None}
        asked = [config for config in configs if config not in settled]
        with closing(self.backend.enter_kernels(role, asked, gate.terms)) as ends:
            for config in configs:
                yield settled[config] if config in settled else self._enter(role, tokens, config, gate, next(ends))

    def _settled(self, role: Role, tokens: int, config: MoEKernelConfig) -> Outcome | None:
        """Return how a config ended that is not launched, or not again."""
        outside = self.why_outside(role, config) if (role, config) in self.compiled else None
        if outside is not None:
            return Failed(FailureKind.RESOURCES, outside)
        known = self.screened.get((SUBJECT_OF[role], EVERY_COUNT, config)) or self.known(role, tokens, config)
        if known is not None:
            return known.outcome
        if (role, config) not in self.compiled:
            return Failed(FailureKind.COMPILE, "was not compiled before the budget ended")
        return None

    def _enter(self, role: Role, tokens: int, config: MoEKernelConfig, gate: Gate, entered: Entered) -> Outcome:
        self.loaded.add((role, config))
        slow = None if entered.first_us is None else gate.refuse(config, entered.first_us)
        outcome = slow or entered.outcome
        assert outcome is not None, "a kernel that is not slow has samples"
        return self.end(self._screening(role, tokens, config, outcome))

    def sample(self, role: Role, tokens: int, configs: Sequence[MoEKernelConfig], samples: int) -> Generator[Outcome]:
        """Time each kernel with at least ``samples`` samples, unless it already was."""
        return self._sample(role, tokens, configs, samples, self.backend.time_kernels)

    def sample_and_recheck(
        self, role: Role, tokens: int, configs: Sequence[MoEKernelConfig], samples: int
    ) -> Generator[Outcome]:
        """Do the same for kernels that may win, and compare each again after its launches; a wrong one has no time."""
        return self._sample(role, tokens, configs, samples, self.backend.time_and_recheck_kernels)

    def _sample(
        self, role: Role, tokens: int, configs: Sequence[MoEKernelConfig], samples: int, time: TimeKernels
    ) -> Generator[Outcome]:
        known = {config: end for config in configs if (end := self._sampled(role, tokens, config, samples)) is not None}
        with closing(time(role, [config for config in configs if config not in known], samples)) as ends:
            for config in configs:
                yield known[config] if config in known else self._end_sampled(role, tokens, config, next(ends))

    def _sampled(self, role: Role, tokens: int, config: MoEKernelConfig, samples: int) -> Outcome | None:
        """Return the outcome of a kernel that failed or has so many samples; those of a last heat were rechecked."""
        known = self.known(role, tokens, config)
        enough = known is not None and (isinstance(known.outcome, Failed) or known.outcome.samples >= samples)
        return known.outcome if known is not None and enough else None

    def _end_sampled(self, role: Role, tokens: int, config: MoEKernelConfig, outcome: Outcome) -> Outcome:
        known = self.known(role, tokens, config)
        verified = known is not None and known.verified and isinstance(outcome, Measured)
        return self.end(replace(self._screening(role, tokens, config, outcome), verified=verified))

    def verify(self, role: Role, tokens: int, configs: Sequence[MoEKernelConfig]) -> list[bool]:
        """Compare kernels with the reference, each once per token count; a wrong one's trial becomes a failure."""
        known = {config: self.known(role, tokens, config) for config in configs}
        timed = {config: trial for config, trial in known.items() if trial and isinstance(trial.outcome, Measured)}
        asked = {config: trial for config, trial in timed.items() if not trial.verified}
        with closing(self.backend.verify_kernels(role, list(asked))) as verdicts:
            for (config, trial), wrong in zip(asked.items(), verdicts, strict=True):
                timed[config] = replace(trial, outcome=wrong or trial.outcome, verified=wrong is None)
                self.end(timed[config])
        return [config in timed and timed[config].verified for config in configs]

    def known(self, role: Role, tokens: int, config: MoEKernelConfig) -> Trial | None:
        """Return the latest screening of a config at one token count."""
        return self.screened.get((SUBJECT_OF[role], tokens, config))

    def ended(self, role: Role, tokens: int) -> dict[MoEKernelConfig, Outcome]:
        """Return the latest outcome of every config tried at one token count; compiler's failures count at each."""
        subject = SUBJECT_OF[role]
        return {
            config: trial.outcome
            for (known, count, config), trial in self.screened.items()
            if known is subject and count in (tokens, EVERY_COUNT) and isinstance(config, MoEKernelConfig)
        }

    def forget(self, role: Role, tokens: int, config: MoEKernelConfig) -> None:
        """Drop what is known of a config at one token count, so that it can be tried again."""
        self.screened.pop((SUBJECT_OF[role], tokens, config), None)

    def routing(self, tokens: int, block_m: int) -> Outcome:
        """Time routing at one ``block_m``, once per token count."""
        return self._part(Subject.ROUTING, tokens, block_m)

    def combine(self, tokens: int) -> Outcome:
        """Time combine, once per token count; it is the same for every ``block_m``."""
        return self._part(Subject.COMBINE, tokens, 0)

    def _part(self, subject: Subject, tokens: int, block_m: int) -> Outcome:
        known = self.screened.get((subject, tokens, block_m))
        if known is not None:
            return known.outcome
        routing = subject is Subject.ROUTING
        outcome = self.backend.time_routing(block_m) if routing else self.backend.time_combine()
        return self.end(Trial(subject=subject, tokens=tokens, choice=block_m, stage=Stage.SCREEN, outcome=outcome))

    def _screening(
        self, role: Role, tokens: int, config: MoEKernelConfig, outcome: Outcome, compiled: Compiled | None = None
    ) -> Trial:
        return Trial(
            subject=SUBJECT_OF[role],
            tokens=tokens,
            choice=config,
            stage=Stage.SCREEN,
            outcome=outcome,
            compiled=compiled or self.compiled.get((role, config)),
        )


def time_of(outcome: Outcome) -> float:
    """Return the median in microseconds, infinite for a failure: for sorting."""
    return outcome.median_us if isinstance(outcome, Measured) else float("inf")
