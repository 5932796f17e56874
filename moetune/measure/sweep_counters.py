"""Hardware counters of a sweep's winners, by ncu in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from moetune.engine.backend import LayerFigures
from moetune.measure.counter_names import chip_of
from moetune.measure.counters import SWEEP_SETS, CounterJob, read_counters, set_metrics
from moetune.measure.counters_run import WAIT_LIMIT_S, CountersRun
from moetune.measure.figures import counted
from moetune.measure.ncu import blocked
from moetune.models.roofline import layer_work
from moetune.models.routing import UNIFORM, Routing
from moetune.outcome import Failed
from moetune_kernels.device import DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

COUNTERS_LIMIT_S = 120.0


class SweepCounters:
    """Reads counters of one layer's plans, by a run of ncu that was started ahead where :meth:`prepare` was called.

    Args:
        shape: the layer.
        device_index: the CUDA device, as torch counts it here.
        routing: how the rows choose experts, as they did when they were timed.
    """

    def __init__(self, shape: MoEShape, device_index: int, routing: Routing = UNIFORM) -> None:
        self._shape, self._index, self._routing = shape, device_index, routing
        self._ahead: CountersRun | None = None

    def prepare(self, device: DeviceInfo) -> None:
        """Start ncu and its worker, which load all they need but touch no GPU; does nothing where counters are blocked."""
        if self._ahead is None:
            self._ahead = _started_ahead(self._shape, device)

    def read(
        self, plans: Mapping[int, LayerPlan], device: DeviceInfo, limit_s: float, make_room: Callable[[], None]
    ) -> dict[int, LayerFigures | Failed]:
        """Read counters for each token count's plan.

        Args:
            plans: one plan per token count.
            device: the GPU, already known, so that the caller's process need not ask CUDA.
            limit_s: wall seconds that this may take.
            make_room: frees what the caller holds on the GPU: ncu's process makes its own weights.
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
            found = read_counters(
                list(jobs),
                device=device,
                device_index=self._index,
                sets=SWEEP_SETS,
                time_limit_s=limit_s,
                ahead=self._ahead,
            )
        finally:
            self.close()
        return {
            jobs[job]: result if isinstance(result, Failed) else counted(result, layer_work(self._shape, job.tokens))
            for job, result in found.items()
        }

    def close(self) -> None:
        """End what was started ahead; safe to call twice."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


def _started_ahead(shape: MoEShape, device: DeviceInfo) -> CountersRun | None:
    """Return a run of ncu that waits for its jobs; None where there can be none, and :func:`read_counters` says why."""
    if blocked() is not None or chip_of(device.sm) is None:
        return None
    (chosen,) = SWEEP_SETS
    try:
        run = CountersRun(set_metrics(shape.format, chosen, device))
    except OSError:
        return None
    try:
        run.start(COUNTERS_LIMIT_S, WAIT_LIMIT_S)
    except OSError:
        run.close()
        return None
    return run
