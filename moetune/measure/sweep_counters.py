"""Hardware counters of a sweep's winners, by ncu in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping

from moetune.engine.backend import LayerFigures
from moetune.measure.counters import SWEEP_SETS, CounterJob, read_counters
from moetune.measure.figures import counted
from moetune.models.roofline import layer_work
from moetune.models.routing import UNIFORM, Routing
from moetune.outcome import Failed
from moetune_kernels.device import DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

COUNTERS_LIMIT_S = 120.0


def sweep_counters(
    shape: MoEShape,
    plans: Mapping[int, LayerPlan],
    device: DeviceInfo,
    device_index: int,
    limit_s: float,
    routing: Routing = UNIFORM,
) -> dict[int, LayerFigures | Failed]:
    """Read counters for each token count's plan. ncu's process makes its own weights: free yours first.

    Args:
        shape: the layer.
        plans: one plan per token count.
        device: the GPU, already known, so that the caller's process need not ask CUDA.
        device_index: the same one, as torch counts it here.
        limit_s: wall seconds that this may take.
        routing: how the rows choose experts, as they did when they were timed.
    """
    jobs = {
        CounterJob(shape=shape, tokens=tokens, plan=plan, routing=routing): tokens for tokens, plan in plans.items()
    }
    found = read_counters(list(jobs), device=device, device_index=device_index, sets=SWEEP_SETS, time_limit_s=limit_s)
    return {
        jobs[job]: result if isinstance(result, Failed) else counted(result, layer_work(shape, job.tokens))
        for job, result in found.items()
    }
