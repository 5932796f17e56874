"""What is known of a running sweep, told by its events; knows no screen."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from moetune.engine.events import (
    CompileProgress,
    CountersStarted,
    Event,
    GapProbed,
    GpuAwaited,
    SurveyStarted,
    SweepStarted,
    TokenDone,
    TokenFailed,
    TokenRefused,
    TokenStarted,
    TrialEnded,
)
from moetune.outcome import Failed, FailureKind, Subject, Trial
from moetune_kernels.table import Entry

SPEED_WINDOW_S, SPEED_LEAST_S = 10.0, 1.0


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


class Speed:
    """How many per second ended lately: over the last ten seconds, or since it was made if that is less."""

    def __init__(self, now_s: float) -> None:
        self._started_s = now_s
        self._ended: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, count: int) -> None:
        """Take in ``count`` that ended now."""
        self._ended.append((now_s, count))
        while self._ended[0][0] < now_s - SPEED_WINDOW_S:
            self._ended.popleft()

    def per_second(self, now_s: float) -> float | None:
        """Return the speed, None before there is one: a second tells nothing."""
        lasted_s = min(now_s - self._started_s, SPEED_WINDOW_S)
        lately = sum(count for ended_s, count in self._ended if ended_s >= now_s - SPEED_WINDOW_S)
        return lately / lasted_s if lasted_s >= SPEED_LEAST_S and lately else None


@dataclass
class SweepProgress:
    """The state of a sweep. Feed every event to :meth:`update`; times are read from ``clock``, in seconds.

    The phases are ``waiting for the GPU``, ``compiling``, ``surveying``, ``measuring``, ``looking between entries`` and ``reading counters``. Kernels that
    a search asked for are compiled meanwhile: that is no phase, its steps stand behind those of the token counts.
    """

    clock: Callable[[], float] = time.monotonic
    phase: str = "starting"
    rows: dict[int, TokenProgress] = field(default_factory=dict[int, TokenProgress])
    trials: int = 0
    failures: Counter[str] = field(default_factory=Counter[str])
    steps: tuple[int, int] = (0, 0)  # done and all of the phase: kernels while compiling, token counts while measuring
    current: set[int] = field(default_factory=set[int])  # the token counts that are being measured, one per GPU
    beside: tuple[int, int] | None = None  # kernels compiled and all asked for, while some are under way

    def __post_init__(self) -> None:
        self._phase_started_s = self.clock()
        self._speed = Speed(self._phase_started_s)

    def update(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case GpuAwaited():
                self.phase = "waiting for the GPU"
            case SweepStarted(tokens=tokens):
                self.phase = "starting"
                self.rows = {count: TokenProgress(count) for count in tokens}
            case CompileProgress(done=done, total=total):
                self._compile(done, total)
            case TrialEnded(trial=trial):
                self._count(trial)
            case GapProbed():
                self._enter("looking between entries", (0, 0))
            case CountersStarted():
                self._enter("reading counters", (0, 0))
            case _:
                self._update_count(event)

    def _update_count(self, event: Event) -> None:
        match event:
            case TokenStarted(tokens=tokens, place=place, total=total):
                others = self.current - {tokens} if self.phase == "measuring" else set[int]()
                self._enter("measuring", (max(place - 1 - len(others), 0), total))
                self.current = {*others, self._row(tokens).tokens}
            case SurveyStarted(tokens=tokens, place=place, total=total):
                self._enter("surveying", (place - 1, total))
                self.current = {self._row(tokens).tokens}
            case TokenDone(entry=entry):
                self._step(entry.tokens)
                self._row(entry.tokens).entry = entry
            case TokenFailed(tokens=tokens, reason=reason) | TokenRefused(tokens=tokens, reason=reason):
                self._step(tokens)
                self._row(tokens).failed = reason
            case _:
                pass

    @property
    def per_second(self) -> float | None:
        """Candidates per second: compiled ones while compiling, else those whose trials ended."""
        return self._speed.per_second(self.clock())

    @property
    def eta_s(self) -> float | None:
        """Seconds until this phase ends at the speed so far, None before there is a speed and when nothing is left."""
        done, total = self.steps
        lasted_s = self.clock() - self._phase_started_s
        return lasted_s * (total - done) / done if 0 < done < total and lasted_s >= SPEED_LEAST_S else None

    def _enter(self, phase: str, steps: tuple[int, int]) -> None:
        """Go on with ``phase``; a new one starts its own clock and speed."""
        if self.phase != phase:
            self.phase, self._phase_started_s = phase, self.clock()
            self._speed = Speed(self._phase_started_s)
        self.steps, self.current = steps, set()

    def _compile(self, done: int, total: int) -> None:
        if self.phase not in ("starting", "compiling"):
            self.beside = (done, total) if done < total else None
            return
        before = self.steps[0] if self.phase == "compiling" else 0
        self._enter("compiling", (done, total))
        self._speed.add(self.clock(), max(done - before, 0))

    def _step(self, tokens: int) -> None:
        done, total = self.steps
        self.steps = min(done + 1, total), total
        self.current.discard(tokens)

    def _row(self, tokens: int) -> TokenProgress:
        return self.rows.setdefault(tokens, TokenProgress(tokens))

    def _count(self, trial: Trial) -> None:
        self.trials += 1
        if self.phase != "compiling":
            self._speed.add(self.clock(), 1)
        if isinstance(trial.outcome, Failed):
            self.failures[trial.outcome.kind.value] += 1
            return
        best, time_us = self._row(trial.tokens).best_us, trial.outcome.median_us
        best[trial.subject] = min(time_us, best.get(trial.subject, time_us))


def status_line(progress: SweepProgress) -> str:
    """Return the phase, its steps, speed, remaining time and failures in one line."""
    done, total = progress.steps
    parts = [f"{progress.phase} {done}/{total}" if total else progress.phase]
    if progress.beside is not None:
        parts.append("compiling {}/{}".format(*progress.beside))
    speed = progress.per_second
    if speed is not None:
        parts.append(f"{speed:.1f} candidates/s" if speed < 100 else f"{speed:.0f} candidates/s")
    if progress.eta_s is not None:
        parts.append(f"ETA {clock_text(progress.eta_s)}")
    parts += how_many_ended(progress.failures)
    return " · ".join(parts)


def how_many_ended(failures: Mapping[str, int]) -> list[str]:
    """Return how many trials a recording did not hold, which is no failure of theirs, and how many were dropped and why.

    >>> how_many_ended({"slow": 2, "unrecorded": 30, "wrong": 9})
    ['30 not recorded', 'dropped: 9 wrong, 2 slow']
    """
    missing = failures.get(FailureKind.UNRECORDED.value, 0)
    counts = Counter(failures).most_common()
    dropped = [f"{count} {kind}" for kind, count in counts if kind != FailureKind.UNRECORDED.value]
    return [f"{missing} not recorded"] * bool(missing) + ["dropped: " + ", ".join(dropped)] * bool(dropped)


def clock_text(seconds: float) -> str:
    """Return minutes and seconds.

    >>> clock_text(83.4)
    '1:23'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
