"""What is known of a running sweep, told by its events; knows no screen."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from moetune.engine.events import (
    CompileProgress,
    CountersStarted,
    Event,
    SweepStarted,
    TokenDone,
    TokenFailed,
    TokenStarted,
    TrialEnded,
)
from moetune.outcome import Failed, Subject, Trial
from moetune_kernels.table import Entry


@dataclass(slots=True)
class TokenProgress:
    """One token count: its best times so far in microseconds per subject, then its entry or why there is none."""

    tokens: int
    best_us: dict[Subject, float] = field(default_factory=dict[Subject, float])
    entry: Entry | None = None
    failed: str | None = None

    @property
    def layer_us(self) -> float | None:
        """Return the best layer so far; before a whole layer was timed, the sum of the best kernels."""
        if self.entry is not None:
            return self.entry.median_us
        if Subject.LAYER in self.best_us:
            return self.best_us[Subject.LAYER]
        parts = [self.best_us.get(Subject.GATE_UP), self.best_us.get(Subject.DOWN)]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None


@dataclass
class SweepProgress:
    """The state of a sweep. Feed every event to :meth:`update`; times are read from ``clock``, in seconds."""

    clock: Callable[[], float] = time.monotonic
    phase: str = "starting"
    rows: dict[int, TokenProgress] = field(default_factory=dict[int, TokenProgress])
    trials: int = 0
    failures: Counter[str] = field(default_factory=Counter[str])
    _phase_started_s: float = 0.0
    _steps: tuple[int, int] = (0, 0)  # done and all of the phase
    _ended: int = 0  # candidates of the phase

    def update(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case SweepStarted(tokens=tokens):
                self.rows = {count: TokenProgress(count) for count in tokens}
            case CompileProgress(done=done, total=total):
                self._enter("compiling", (done, total), ended=done)
            case TokenStarted(tokens=tokens, place=place, total=total):
                self._enter("measuring", (place - 1, total), ended=0)
                self._row(tokens)
            case TrialEnded(trial=trial):
                self._count(trial)
            case TokenDone(entry=entry):
                self._step()
                self._row(entry.tokens).entry = entry
            case TokenFailed(tokens=tokens, reason=reason):
                self._step()
                self._row(tokens).failed = reason
            case CountersStarted():
                self._enter("reading counters", (0, 0), ended=0)
            case _:
                pass

    @property
    def per_second(self) -> float:
        """Candidates of this phase per second."""
        elapsed_s = self.clock() - self._phase_started_s
        return self._ended / elapsed_s if elapsed_s > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds until this phase ends at the speed so far, None before there is a speed."""
        done, total = self._steps
        return (self.clock() - self._phase_started_s) * (total - done) / done if done else None

    @property
    def steps(self) -> tuple[int, int]:
        """Done and all steps of the phase: kernels while compiling, token counts while measuring."""
        return self._steps

    def _enter(self, phase: str, steps: tuple[int, int], *, ended: int) -> None:
        """Go on with ``phase``; a new one starts its own clock and count of ``ended`` candidates."""
        if self.phase != phase:
            self.phase, self._phase_started_s, self._ended = phase, self.clock(), 0
        self._steps, self._ended = steps, max(ended, self._ended)

    def _step(self) -> None:
        done, total = self._steps
        self._steps = (done + 1, total)

    def _row(self, tokens: int) -> TokenProgress:
        return self.rows.setdefault(tokens, TokenProgress(tokens))

    def _count(self, trial: Trial) -> None:
        self.trials += 1
        self._ended += 1
        if isinstance(trial.outcome, Failed):
            self.failures[trial.outcome.kind.value] += 1
            return
        best, time_us = self._row(trial.tokens).best_us, trial.outcome.median_us
        best[trial.subject] = min(time_us, best.get(trial.subject, time_us))


def status_line(progress: SweepProgress) -> str:
    """Return the phase, its steps, speed, remaining time and failures in one line."""
    done, total = progress.steps
    parts = [f"{progress.phase} {done}/{total}" if total else progress.phase]
    if progress.per_second:
        speed = progress.per_second
        parts.append(f"{speed:.1f} candidates/s" if speed < 100 else f"{speed:.0f} candidates/s")
    if progress.eta_s is not None:
        parts.append(f"ETA {clock_text(progress.eta_s)}")
    if progress.failures:
        parts.append("dropped: " + ", ".join(f"{count} {kind}" for kind, count in progress.failures.most_common()))
    return " · ".join(parts)


def clock_text(seconds: float) -> str:
    """Return minutes and seconds.

    >>> clock_text(83.4)
    '1:23'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
