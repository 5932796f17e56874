"""What a sweep tells its audience while it runs: frozen values, for a live display or a log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moetune.outcome import Trial
from moetune_kernels.config import Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import MoEShape
from moetune_kernels.table import Entry


@dataclass(frozen=True, slots=True)
class GpuAwaited:
    """Another sweep has the GPU, ``holder`` says which; this one starts when that one ends, and its budget does not run meanwhile."""

    gpu: str
    holder: str


@dataclass(frozen=True, slots=True)
class SweepStarted:
    """The backend is ready. ``backend`` is ``cuda`` or ``replay``; ``resumed`` trials are taken from the store.

    ``routing`` is how tokens choose experts, as tables spell it.
    """

    backend: str
    device: DeviceInfo
    shape: MoEShape
    tokens: tuple[int, ...]
    store: Path
    resumed: int
    routing: str = "uniform"


@dataclass(frozen=True, slots=True)
class SpaceReady:
    """The candidates of one role are chosen: ``kept`` of ``legal``, and reasons why the others cannot run.

    ``outside`` counts what each of the user's limits removed of those that can run, ``duplicates`` those that were another
    one once clamped, ``ceilings`` the legal ones by the lowest shared-memory ceiling in bytes that they keep to.
    """

    role: Role
    kept: int
    legal: int
    removed: Mapping[str, int]
    outside: Mapping[str, int] = field(default_factory=dict[str, int])
    duplicates: int = 0
    ceilings: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True)
class SpaceCompiled:
    """The candidates of one role are compiled: ``inside`` the user's limits, and which limit removed how many others."""

    role: Role
    inside: int
    outside: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CompileProgress:
    """``done`` of the ``total`` kernels asked for so far are compiled, ``failed`` of them dropped."""

    done: int
    total: int
    failed: int


@dataclass(frozen=True, slots=True)
class SurveyStarted:
    """Candidates get their first samples at token count number ``place`` of ``total`` that want kernels of their own."""

    tokens: int
    place: int
    total: int


@dataclass(frozen=True, slots=True)
class TokenStarted:
    """Token count number ``place`` of ``total`` is being tuned."""

    tokens: int
    place: int
    total: int


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """One trial ended and is in the store."""

    trial: Trial


@dataclass(frozen=True, slots=True)
class TokenDone:
    """One token count has its entry, or a better one."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class TokenFailed:
    """One token count has no entry, and why."""

    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class TokenRefused:
    """One token count was measured in a state that is not trusted, so the table gets no entry of it; and why."""

    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class GapProbed:
    """Between two entries plans were timed: ``serving`` is the entry that serves ``tokens``, ``loss`` what that costs.

    The loss is the share by which its plan is slower there than the best one known nearby; where it is too much,
    ``is_tuned`` next.
    """

    tokens: int
    serving: int
    loss: float
    is_tuned: bool = False


@dataclass(frozen=True, slots=True)
class TableWritten:
    """The table on disk holds ``entries`` entries."""

    path: Path
    entries: int


@dataclass(frozen=True, slots=True)
class CountersStarted:
    """Hardware counters of the winners are being read."""

    entries: int


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that the user should know, and that did not stop the sweep."""

    text: str


Event = (
    GpuAwaited
    | SweepStarted
    | SpaceReady
    | SpaceCompiled
    | CompileProgress
    | SurveyStarted
    | TokenStarted
    | TrialEnded
    | TokenDone
    | TokenFailed
    | TokenRefused
    | GapProbed
    | TableWritten
    | CountersStarted
    | Warned
)
Emit = Callable[[Event], None]


def one_at_a_time(on_event: Emit) -> Emit:
    """Return the audience of several threads."""
    lock = threading.RLock()

    def emit(event: Event) -> None:
        with lock:
            on_event(event)

    return emit
