"""What a store and a recording hand out: trials with their runs, and which of them are wanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moetune.outcome import EVERY_COUNT, Failed, FailureKind, Measured, Subject, Trial
from moetune.store.codec import Choice
from moetune.store.recording import Recording
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import MoEShape

TrialKey = tuple[Subject, int, Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One stored trial with the run that it belongs to, for reports and recordings."""

    run: str
    backend: str
    shape: MoEShape
    device: DeviceInfo
    kernels_sha256: str
    triton: str
    torch: str
    driver: str
    routing: str
    trial: Trial
    ended_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One sweep's run: what its trials depend on, and what it found of the device.

    ``gpu`` is the GPU's UUID. ``ended_at`` is None for a run that was stopped or still runs. Runs of the store's first version
    have neither, and no ``moetune``, the version of this package.
    """

    run: str
    backend: str
    shape: MoEShape
    device: DeviceInfo
    ceilings: Mapping[str, float] | None
    command: str
    started_at: str
    provenance: str
    kernels_sha256: str
    triton: str
    torch: str
    driver: str
    moetune: str | None = None
    gpu: str | None = None
    ended_at: str | None = None
    routing: str = "uniform"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTrial:
    """One trial with its whole run.

    Args:
        number: its place in the store; None in a recording.
        run: the run that it belongs to.
        trial: choice and outcome.
        ended_at: when, ISO 8601, UTC; of a recording, when that was measured.
        bound_us: the physical bound of its token count in its run.
    """

    number: int | None
    run: RunRow
    trial: Trial
    ended_at: str
    bound_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFilter:
    """Which trials are wanted; every field that is set must agree.

    Args:
        shape_key: of this layer.
        tokens: at one of these counts, or ended at compile, which counts for all.
        subject: of this part of the layer.
        failed: ended without a time.
        kind: ended in this way.
        verified: compared with the reference, and right.
    """

    shape_key: str | None = None
    tokens: tuple[int, ...] = ()
    subject: Subject | None = None
    failed: bool = False
    kind: FailureKind | None = None
    verified: bool = False

    def admits(self, shape: MoEShape, trial: Trial) -> bool:
        """Say whether a trial of ``shape`` is wanted."""
        failure = trial.outcome if isinstance(trial.outcome, Failed) else None
        return (
            self.shape_key in (None, shape.key)
            and (not self.tokens or trial.tokens in (*self.tokens, EVERY_COUNT))
            and self.subject in (None, trial.subject)
            and (failure is not None or not (self.failed or self.kind))
            and (self.kind is None or (failure is not None and failure.kind is self.kind))
            and (trial.verified or not self.verified)
        )

    def condition(self) -> tuple[str, list[object]]:
        """Return the same as SQL over ``trials`` and ``runs``, with its values; outcomes are JSON with sorted keys."""
        parts, values = ["1"], list[object]()
        if self.shape_key is not None:
            parts.append("runs.shape_key = ?")
            values.append(self.shape_key)
        if self.tokens:
            counts = (*self.tokens, EVERY_COUNT)
            parts.append(f"trials.tokens IN ({', '.join('?' * len(counts))})")
            values += counts
        if self.subject is not None:
            parts.append("trials.subject = ?")
            values.append(self.subject.value)
        if self.failed or self.kind:
            kind = "" if self.kind is None else f'"{self.kind.value}",'
            parts.append("substr(trials.outcome, 1, ?) = ?")
            values += [len(start := f'{{"kind":{kind}'), start]
        if self.verified:
            parts.append("trials.verified = 1")
        return " AND ".join(parts), values


def recorded_run(recording: Recording, name: str) -> RunRow:
    """Return the run that stands for a recording called ``name``."""
    made_for = recording.provenance
    texts = {
        text: getattr(made_for, text) for text in ("backend", "kernels_sha256", "triton", "torch", "driver", "routing")
    }
    return RunRow(
        run=name,
        shape=made_for.shape,
        device=made_for.device,
        ceilings=recording.ceilings,
        command=recording.command,
        started_at=recording.measured_at,
        provenance=made_for.key,
        **texts,
    )


def newest_recorded(recording: Recording, run: RunRow, wanted: TrialFilter) -> list[ListedTrial]:
    """Return the recorded trials that are wanted, the latest first."""
    return [
        ListedTrial(
            number=None,
            run=run,
            trial=trial,
            ended_at=recording.measured_at,
            bound_us=recording.bounds.get(trial.tokens),
        )
        for trial in reversed(recording.trials)
        if wanted.admits(run.shape, trial)
    ]


def fastest(newest_first: Iterable[ListedTrial], count: int, *, verified: bool = False) -> list[ListedTrial]:
    """Return the ``count`` fastest of every device with its versions, token count and subject, in this order.

    The latest trial of a choice counts: one that turned out wrong is not kept by an earlier time. Only times of equal
    provenance are compared, so each has its own fastest; that of the latest trial comes first.
    """
    latest: dict[tuple[str, TrialKey], ListedTrial] = {}
    for listed in newest_first:
        trial = listed.trial
        latest.setdefault((listed.run.provenance, (trial.subject, trial.tokens, trial.choice)), listed)
    groups: dict[tuple[str, int, Subject], list[tuple[float, ListedTrial]]] = {}
    for (provenance, (subject, tokens, _)), listed in latest.items():
        outcome = listed.trial.outcome
        if isinstance(outcome, Measured) and (listed.trial.verified or not verified):
            groups.setdefault((provenance, tokens, subject), []).append((outcome.median_us, listed))
    places = {provenance: place for place, provenance in enumerate(dict.fromkeys(key[0] for key in latest))}
    order = list(Subject)
    found: list[ListedTrial] = []
    for key in sorted(groups, key=lambda key: (places[key[0]], key[1], order.index(key[2]))):
        found += [listed for _, listed in sorted(groups[key], key=lambda timed: timed[0])[:count]]
    return found
