"""A backend that answers from recorded trials: the whole search runs without a GPU, and no time is ever invented."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moetune.engine.backend import Ceilings, Kernel, KernelByKernel, LayerFigures
from moetune.outcome import (
    EVERY_COUNT,
    SUBJECT_OF,
    Compiled,
    Failed,
    FailureKind,
    Figure,
    Measured,
    Outcome,
    Source,
    Stage,
    Subject,
    Trial,
)
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

Choice = MoEKernelConfig | LayerPlan | int


class ReplayBackend(KernelByKernel):
    """Recorded trials as a backend; see :class:`moetune.engine.backend.Backend`.

    A kernel that was not recorded is ``Failed(UNRECORDED)``. A layer that was not recorded is the sum of its recorded
    kernels, with source ``composed``, and counts as verified when both of its GEMMs were. Every call gives the same
    answer as the last.

    Args:
        shape: the layer that was recorded.
        device: the device that was recorded.
        ceilings: what that device reached.
        bounds: physical bound in microseconds per token count.
        trials: the recorded trials; of two with the same subject, tokens, choice and stage the later one counts.
    """

    def __init__(
        self,
        shape: MoEShape,
        device: DeviceInfo,
        ceilings: Ceilings,
        bounds: Mapping[int, float],
        trials: Iterable[Trial],
    ) -> None:
        self._shape, self._device, self._ceilings, self._bounds = shape, device, ceilings, bounds
        self._trials: dict[tuple[Subject, int, Choice, Stage], Trial] = {}
        self._compiled: dict[tuple[Subject, Choice], Compiled] = {}
        for trial in trials:
            self._trials[trial.subject, trial.tokens, trial.choice, trial.stage] = trial
            if trial.compiled is not None:
                self._compiled[trial.subject, trial.choice] = trial.compiled
        self._tokens: int | None = None
        self._submitted: list[Kernel] = []

    @property
    def name(self) -> str:
        """``replay``."""
        return "replay"

    @property
    def device(self) -> DeviceInfo:
        """The device that was recorded."""
        return self._device

    @property
    def shape(self) -> MoEShape:
        """The layer that was recorded."""
        return self._shape

    @property
    def token_counts(self) -> list[int]:
        """The token counts that have trials and a bound, ascending."""
        raced = {tokens for _, tokens, _, _ in self._trials if tokens != EVERY_COUNT}
        return sorted(raced & set(self._bounds))

    def ceilings(self) -> Ceilings:
        """Return what the device reached when it was recorded."""
        return self._ceilings

    def recorded(self, role: Role) -> Sequence[MoEKernelConfig]:
        """Return every recorded config of ``role``, in the order of their first trials."""
        found = [
            choice
            for subject, _, choice, _ in self._trials
            if subject is SUBJECT_OF[role] and isinstance(choice, MoEKernelConfig)
        ]
        return list(dict.fromkeys(found))

    def recorded_plans(self, tokens: int) -> Sequence[LayerPlan]:
        """Return every plan with a recorded layer time at ``tokens``, so that its exact time is heard in the finals."""
        return list(
            dict.fromkeys(
                choice
                for subject, count, choice, _ in self._trials
                if subject is Subject.LAYER and count == tokens and isinstance(choice, LayerPlan)
            )
        )

    def submit(self, kernels: Iterable[Kernel]) -> None:
        """Queue kernels, whose recorded reports are there at once."""
        self._submitted.extend(kernels)

    def ended(self, wait_s: float = 0.0) -> Sequence[tuple[Kernel, Compiled | Failed]]:
        """Return what the compiler reported of all queued kernels when the trials were recorded."""
        del wait_s
        kernels, self._submitted = self._submitted, []
        return [(kernel, self._compiler_said(*kernel)) for kernel in kernels]

    def withdraw(self) -> Sequence[Kernel]:
        """Take back all that is queued."""
        kernels, self._submitted = self._submitted, []
        return kernels

    def _compiler_said(self, role: Role, config: MoEKernelConfig) -> Compiled | Failed:
        ended = self._trials.get((SUBJECT_OF[role], EVERY_COUNT, config, Stage.SCREEN))
        if ended is not None and isinstance(ended.outcome, Failed):
            return ended.outcome
        compiled = self._compiled.get((SUBJECT_OF[role], config))
        return compiled or _unrecorded(f"{role.value} was never compiled with this config")

    def open(self, tokens: int) -> Failed | None:
        """Choose the token count; one without trials or without a bound has no answers."""
        if tokens not in self.token_counts:
            known = ", ".join(map(str, self.token_counts))
            return _unrecorded(f"{tokens} tokens were not recorded, only {known}")
        self._tokens = tokens
        return None

    def bound_us(self) -> float:
        """Return the recorded bound."""
        return self._bounds[self._open_tokens]

    def time_kernel(self, role: Role, config: MoEKernelConfig, samples: int) -> Outcome:
        """Return the recorded end of this kernel's race; ``samples`` is whatever was recorded."""
        del samples
        return self._screened(SUBJECT_OF[role], config)

    def first_launch_us(self, role: Role, config: MoEKernelConfig) -> float | Failed:
        """Return the recorded median: first launches are not recorded, and the race only compares them."""
        outcome = self._screened(SUBJECT_OF[role], config)
        return outcome if isinstance(outcome, Failed) else outcome.median_us

    def verify_kernel(self, role: Role, config: MoEKernelConfig) -> Failed | None:
        """Return the recorded verdict; a kernel that was never compared with the reference is no winner."""
        trial = self._trials.get((SUBJECT_OF[role], self._open_tokens, config, Stage.SCREEN))
        if trial is not None and isinstance(trial.outcome, Failed):
            return trial.outcome
        return None if trial is not None and trial.verified else _unrecorded(f"{role.value} was never verified")

    def recheck_kernel(self, role: Role, config: MoEKernelConfig) -> Failed | None:
        """Return the recorded verdict again: a kernel that was wrong after its timing was recorded as failed."""
        return self.verify_kernel(role, config)

    def time_routing(self, block_m: int) -> Outcome:
        """Return the recorded time of route and permute."""
        return self._screened(Subject.ROUTING, block_m)

    def time_combine(self) -> Outcome:
        """Return the recorded time of combine."""
        return self._screened(Subject.COMBINE, 0)

    def time_layers(self, plans: Sequence[LayerPlan], rounds: int) -> Sequence[Outcome]:
        """Return recorded layer times, and sums of recorded kernels where a layer was not timed."""
        del rounds
        return [self._layer(plan) for plan in plans]

    def time_rerouted(self, plans: Sequence[LayerPlan], rounds: int) -> Sequence[Sequence[Outcome]]:
        """Return nothing: a plan that lost under another routing was recorded as failed."""
        del plans, rounds
        return ()

    def verify_layer(self, plan: LayerPlan) -> Failed | None:
        """Return the recorded verdict, else that of both kernels."""
        trial = self._trials.get((Subject.LAYER, self._open_tokens, plan, Stage.FINAL))
        if trial is not None and isinstance(trial.outcome, Failed):
            return trial.outcome
        if trial is not None and trial.verified:
            return None
        verdicts = [self.verify_kernel(role, plan.config(role)) for role in Role]
        return next((verdict for verdict in verdicts if verdict is not None), None)

    def prepare_counters(self) -> None:
        """Prepare nothing: a replay counts nothing."""

    def counters(self, plans: Mapping[int, LayerPlan], limit_s: float = 0.0) -> dict[int, LayerFigures | Failed]:
        """Return no counters: what was counted is in the recorded figures already."""
        del limit_s
        return {tokens: _unrecorded("a replay has no more than the recorded figures") for tokens in plans}

    def close(self) -> None:
        """Hold nothing."""

    @property
    def _open_tokens(self) -> int:
        assert self._tokens is not None, "open a token count first"
        return self._tokens

    def _screened(self, subject: Subject, choice: Choice) -> Outcome:
        trial = self._trials.get((subject, self._open_tokens, choice, Stage.SCREEN))
        return _unrecorded(f"{subject.value} has no trial of this choice") if trial is None else trial.outcome

    def _layer(self, plan: LayerPlan) -> Outcome:
        trial = self._trials.get((Subject.LAYER, self._open_tokens, plan, Stage.FINAL))
        if trial is not None:
            return trial.outcome
        parts = [
            self._screened(Subject.ROUTING, plan.block_m),
            self._screened(Subject.GATE_UP, plan.gate_up),
            self._screened(Subject.DOWN, plan.down),
            self._screened(Subject.COMBINE, 0),
        ]
        measured = [part for part in parts if isinstance(part, Measured)]
        if len(measured) == len(parts):
            return composed(measured)
        return next(part for part in parts if isinstance(part, Failed))


def composed(parts: Sequence[Measured]) -> Measured:
    """Return the sum of kernels that were timed apart: times and spreads add, rates are weighted by what they count."""
    return Measured(
        median_us=sum(part.median_us for part in parts),
        spread_us=sum(part.spread_us for part in parts),
        samples=min(part.samples for part in parts),
        flops_per_byte=_mean([(part.flops_per_byte, _gigabytes_per_s_us(part)) for part in parts]),
        bandwidth_gbps=_mean([(part.bandwidth_gbps, part.median_us) for part in parts]),
        issue_efficiency=_mean([(part.issue_efficiency, part.median_us) for part in parts]),
        source=Source.COMPOSED,
    )


def _gigabytes_per_s_us(part: Measured) -> float | None:
    """Return a kernel's bytes in units of 1000: its bandwidth times its time."""
    bandwidth = part.bandwidth_gbps.value
    return None if bandwidth is None else bandwidth * part.median_us


def _mean(figures: Sequence[tuple[Figure, float | None]]) -> Figure:
    """Return the weighted mean, or unavailable with the reason of the first part that has no value or weight."""
    total = weights = 0.0
    for figure, weight in figures:
        if figure.value is None:
            return Figure.unavailable(figure.reason or "a part has no value")
        if weight is None:
            return Figure.unavailable("a part has no bandwidth to weigh it with")
        total, weights = total + figure.value * weight, weights + weight
    return Figure(total / weights, Source.COMPOSED) if weights else Figure.unavailable("no part moves a byte")


def _unrecorded(reason: str) -> Failed:
    return Failed(FailureKind.UNRECORDED, reason)
