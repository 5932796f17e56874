"""Hardware counters of a sweep's winners, read in a process of its own: by ncu, or by CUPTI with ncu behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from moetune.engine.backend import LayerFigures
from moetune.measure.counter_names import chip_of
from moetune.measure.counter_ways import CUPTI, NCU
from moetune.measure.counters import (
    SWEEP_SETS,
    CounterJob,
    CountersOfJob,
    Reader,
    RunPlan,
    read_counters,
    set_metrics,
)
from moetune.measure.counters_run import WAIT_LIMIT_S, CountersRun, CounterWay
from moetune.measure.figures import counted
from moetune.models.roofline import Work, layer_work
from moetune.models.routing import UNIFORM, Routing
from moetune.outcome import Failed, Figure, Source
from moetune_kernels.device import DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

COUNTERS_LIMIT_S = 120.0
# The first way that works; the later ones read what an earlier one could not.
CUPTI_FIRST = (CUPTI, NCU)
WAYS = (NCU,)  # CUPTI_FIRST once a GPU has shown that CUPTI agrees with ncu and is faster (benchmarks/counters.py)
_NOTE = 500  # characters of a note that goes into a table
_LEAST_S = 5.0  # a way that stands behind another one is not begun with less
_SHARE, _TURN_S = 0.5, 25.0  # of the time left, and seconds: what a way may take while another one stands behind it


class SweepCounters:
    """Reads counters of one layer's plans, by a worker that was started ahead where :meth:`prepare` was called.

    Args:
        shape: the layer.
        device_index: the CUDA device, as torch counts it here.
        routing: how the rows choose experts, as they did when they were timed.
        ways: how to read them, the best one first.
    """

    def __init__(
        self, shape: MoEShape, device_index: int, routing: Routing = UNIFORM, *, ways: Sequence[CounterWay] = WAYS
    ) -> None:
        self._shape, self._index, self._routing, self._ways = shape, device_index, routing, tuple(ways)
        self._ahead: CountersRun | None = None

    def prepare(self, device: DeviceInfo) -> None:
        """Start the worker, which loads all it needs but touches no GPU; does nothing where counters are blocked."""
        if self._ahead is None:
            self._ahead = _started_ahead(self._shape, device, self._ways)

    def read(
        self, plans: Mapping[int, LayerPlan], device: DeviceInfo, limit_s: float, make_room: Callable[[], None]
    ) -> dict[int, LayerFigures | Failed]:
        """Read counters for each token count's plan.

        Args:
            plans: one plan per token count.
            device: the GPU, already known, so that the caller's process need not ask CUDA.
            limit_s: wall seconds that this may take.
            make_room: frees what the caller holds on the GPU: the worker makes its own weights.
        """
        if not plans:
            return {}
        jobs = {
            CounterJob(shape=self._shape, tokens=tokens, plan=plan, routing=self._routing): tokens
            for tokens, plan in plans.items()
        }
        try:
            if self._ahead is not None:
                with suppress(OSError):  # a full disk, which the jobs will tell of
                    self._ahead.wake(self._index)
            make_room()
            answers = self._answers(list(jobs), device, limit_s)
        finally:
            self.close()
        return {tokens: _figures(answers[job], layer_work(self._shape, tokens)) for job, tokens in jobs.items()}

    def close(self) -> None:
        """End what was started ahead; safe to call twice."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _answers(
        self, jobs: Sequence[CounterJob], device: DeviceInfo, limit_s: float
    ) -> dict[CounterJob, dict[str, CountersOfJob]]:
        """Return what each way said of a job, by its title; the last one is the first that could read it, if any could."""
        deadline = time.monotonic() + limit_s
        answers: dict[CounterJob, dict[str, CountersOfJob]] = {job: {} for job in jobs}
        for way in self._ways:
            lacking = [job for job in jobs if all(isinstance(answer, Failed) for answer in answers[job].values())]
            left_s = max(deadline - time.monotonic(), 0.0)
            if way is not self._ways[0] and (not lacking or left_s < _LEAST_S):
                break
            read = read_counters(
                lacking,
                by=Reader(way, self._ahead),
                device=device,
                device_index=self._index,
                sets=SWEEP_SETS,
                time_limit_s=left_s if way is self._ways[-1] else min(_SHARE * left_s, _TURN_S),
            )
            for job, answer in read.items():
                answers[job][way.title] = answer
        return answers


def _figures(answers: Mapping[str, CountersOfJob], work: Work) -> LayerFigures | Failed:
    """Return the figures of a layer with a word on who was to read them and could not, or why nobody could."""
    refused = {title: answer for title, answer in answers.items() if isinstance(answer, Failed)}
    *_, (title, last) = answers.items()
    if not isinstance(last, Failed):
        figures = counted(last, work)
        return figures if not refused else _noted(figures, f"read by {title}, because {_joined(refused)}"[:_NOTE])
    return last if len(refused) == 1 else Failed(last.kind, _joined(refused))


def _joined(refused: Mapping[str, Failed]) -> str:
    """Return all reasons, each with the way that gave it unless all gave the same."""
    reasons = {failed.reason for failed in refused.values()}
    if len(reasons) == 1 and len(refused) > 1:
        return reasons.pop()
    return "; ".join(f"{title}: {failed.reason}" for title, failed in refused.items())


def _noted(figures: LayerFigures, note: str) -> LayerFigures:
    """Return the figures, those that were counted with ``note`` behind what is said of them."""

    def noted(figure: Figure) -> Figure:
        if figure.source is not Source.COUNTER:
            return figure
        return replace(figure, reason=note if figure.reason is None else f"{figure.reason}; {note}")

    return LayerFigures(
        flops_per_byte=noted(figures.flops_per_byte),
        bandwidth_gbps=noted(figures.bandwidth_gbps),
        issue_efficiency=noted(figures.issue_efficiency),
    )


def _started_ahead(shape: MoEShape, device: DeviceInfo, ways: Sequence[CounterWay]) -> CountersRun | None:
    """Return a run that waits for its jobs; None where there can be none, and :func:`read_counters` says why."""
    way = next((way for way in ways if way.blocked(device) is None), None)
    if way is None or chip_of(device.sm) is None:
        return None
    (chosen,) = SWEEP_SETS
    plan = RunPlan(way, way.readable(set_metrics(shape.format, chosen, device)), device)
    try:
        run = plan.run()
    except OSError:
        return None
    try:
        run.start(COUNTERS_LIMIT_S, WAIT_LIMIT_S)
    except OSError:
        run.close()
        return None
    return run
