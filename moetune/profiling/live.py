"""The page of the GPU in front of us: events first, then, with this process's memory given back, counters."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from moetune.errors import RunError
from moetune.measure.calls import DTYPES
from moetune.measure.ceilings import measure_ceilings
from moetune.measure.clocks import Clocks
from moetune.measure.counter_rights import UNLOCK, Blocked
from moetune.measure.counters import CounterJob, CountersByJob, read_counters
from moetune.measure.faults import failure
from moetune.measure.inputs import ExpertWeights
from moetune.measure.kernel_jobs import gemm_job
from moetune.measure.ncu import blocked
from moetune.measure.parts import SEED, LayerParts, Part, layer_parts, resident_weights
from moetune.measure.router import Router, router_of
from moetune.measure.timer import CapturedLayers, Launch, Timer
from moetune.models.roofline import nominal_peaks, total_experts
from moetune.models.routing import UNIFORM
from moetune.outcome import Compiled, Failed, summarize
from moetune.profiling.analytical import ROLES, Load
from moetune.profiling.assemble import Timed, assemble
from moetune.profiling.memory import resident_experts, sharing_note
from moetune.profiling.page import Ceilings, LayerProfile
from moetune.profiling.plans import Chosen, choose_plans
from moetune.profiling.request import ProfileRequest
from moetune.profiling.versions import live_versions
from moetune_kernels.device import DeviceInfo, device_info
from moetune_kernels.fused_moe.layer import Weights, moe_from_logits
from moetune_kernels.kernel_call import KernelCall, launch_all
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

SAMPLES = 25  # of each part and of the layer, interleaved
Tell = Callable[[str], None]


def live_profile(request: ProfileRequest, tell: Tell) -> LayerProfile:
    """Profile CUDA device ``request.device_index``.

    Args:
        request: what to profile.
        tell: is told what happens, one short line at a time.

    Raises:
        MissingError: no room for even one expert.
        RunError: a kernel failed.
        UsageError: the routing is a trace that cannot be used for this layer.
    """
    device = device_info(request.device_index)
    plans = choose_plans(request, device)
    place = torch.device("cuda", request.device_index)
    torch.cuda.set_device(place)
    free, _ = torch.cuda.mem_get_info(place)
    resident = resident_experts(request.shape, max(request.tokens), free)
    router = router_of(request.routing, request.shape, SEED)
    try:
        ceilings, timed = _time_all((request.shape, router), plans, resident, device, tell)
    except RunError:
        raise
    except Exception as error:
        raise RunError(f"the profile stopped: {failure(error).reason}") from error
    jobs = [_job(request, chosen, resident) for chosen in plans]
    counters, without = _count(jobs, request.device_index, tell)
    notes = [sharing_note(request.shape, resident), *(reading.clocks.warning for reading in timed)]
    if request.routing != UNIFORM:
        notes.append(f"tokens choose experts by {request.routing.text} routing")
    return LayerProfile(
        shape=request.shape,
        device=device,
        measured=True,
        ceilings=ceilings,
        versions=live_versions(),
        command=request.command,
        tokens=tuple(assemble(one, device, ceilings, counters.get(job)) for one, job in zip(timed, jobs, strict=True)),
        notes=tuple(dict.fromkeys(note for note in notes if note is not None)),
        counters_missing=without.reason if without else None,
        counters_fixes=without.fixes if without else (),
    )


def _time_all(
    routed: tuple[MoEShape, Router], plans: Sequence[Chosen], resident: int, device: DeviceInfo, tell: Tell
) -> tuple[Ceilings, list[Timed]]:
    """Measure the ceilings and time every token count; on return nothing of it is left on the GPU."""
    shape, _ = routed
    place = torch.device("cuda", torch.cuda.current_device())
    peaks = nominal_peaks(device)
    timer, clocks = Timer(place, device.l2_bytes), Clocks.of_device(place.index)
    try:
        tell("measuring what the device reaches")
        reached = measure_ceilings(timer, place, DTYPES[shape.format])
        torch.cuda.empty_cache()
        tell(f"making the weights of {resident} experts")
        weights = resident_weights(shape, None if resident == shape.local_experts else resident, place)
        timed = []
        for chosen in plans:
            tell(f"timing {chosen.tokens} tokens")
            timed.append(_time_one(routed, chosen, weights, (timer, clocks), device))
            torch.cuda.empty_cache()
        del weights
    finally:
        clocks.close()
        del timer
        gc.collect()
        torch.cuda.empty_cache()
    nominal = (peaks.bytes_per_s, peaks.flops) if peaks else (None, None)
    ceilings = Ceilings(
        nominal_bytes_per_s=nominal[0],
        nominal_flops=nominal[1],
        measured_bytes_per_s=reached.bytes_per_s,
        measured_flops=reached.flops,
    )
    return ceilings, timed


def _time_one(
    routed: tuple[MoEShape, Router],
    chosen: Chosen,
    weights: ExpertWeights,
    tools: tuple[Timer, Clocks],
    device: DeviceInfo,
) -> Timed:
    """Capture each part, and the whole layer where it can run, as CUDA graphs, and time them interleaved."""
    timer, clocks = tools
    shape, router = routed
    parts = layer_parts(shape, chosen.tokens, chosen.plan, weights, router)
    launch_all(tuple(call for _, call in parts.calls))
    graphs = CapturedLayers(torch.cuda.Stream())
    try:
        launches = [graphs.capture(_launching(parts.of(part))) for part in parts.present]
        layer = _layer(shape, parts, chosen.plan, weights)
        if layer is not None:
            launches.append(graphs.capture(layer))
        times = [summarize(values).median_us for values in timer.rounds(launches, SAMPLES)]
        reading = clocks.read()
    finally:
        graphs.close()
    return Timed(
        chosen=chosen,
        load=Load.real(shape, chosen.tokens, parts.counts(shape.local_experts)),
        part_us=dict(zip(parts.present, times, strict=False)),
        layer_us=times[-1] if layer is not None else None,
        compiled=_reports(shape, parts, chosen.plan, device),
        names={part: tuple(call.kernel.__name__ for call in parts.of(part)) for part in parts.present},
        clocks=reading,
    )


def _launching(calls: tuple[KernelCall, ...]) -> Launch:
    return lambda: launch_all(calls)


def _layer(shape: MoEShape, parts: LayerParts, plan: LayerPlan, weights: ExpertWeights) -> Callable[[], object] | None:
    """Return the layer as production runs it; None where experts share weights or live on other ranks."""
    if weights.w2.shape[0] != shape.local_experts or total_experts(shape) != shape.local_experts:
        return None
    dense, rows = Weights(weights.w13, weights.w2), parts.rows
    return lambda: moe_from_logits(rows.x, dense, rows.logits, (shape.top_k, True), plan)


def _reports(shape: MoEShape, parts: LayerParts, plan: LayerPlan, device: DeviceInfo) -> dict[Part, Compiled]:
    """Return what the compiler says of the two GEMMs; a report that cannot be read leaves its part out."""
    found: dict[Part, Compiled] = {}
    for part, role in ROLES.items():
        if not parts.of(part):
            continue
        job = gemm_job(role, plan.config(role), shape, device)
        try:
            report = job.report(parts.of(part)[-1].warmup())
        except (OSError, ValueError, KeyError):
            continue
        if isinstance(report, Compiled):
            found[part] = report
    return found


def _job(request: ProfileRequest, chosen: Chosen, resident: int) -> CounterJob:
    shared = None if resident == request.shape.local_experts else resident
    return CounterJob(
        shape=request.shape,
        tokens=chosen.tokens,
        plan=chosen.plan,
        resident_experts=shared,
        routing=request.routing,
    )


def _count(jobs: Sequence[CounterJob], device_index: int, tell: Tell) -> tuple[CountersByJob, Blocked | None]:
    """Return the counters; where no job has any, nothing but why, and the lines that would allow them."""
    found = blocked()
    if found is not None:
        return {}, found
    tell("reading hardware counters with ncu, in two runs")
    counters = read_counters(jobs, device_index=device_index)
    reasons = [outcome.reason for outcome in counters.values() if isinstance(outcome, Failed)]
    if len(reasons) < len(counters):
        return counters, None
    return {}, Blocked(reasons[0], UNLOCK if "ERR_NVGPUCTRPERM" in reasons[0] else ())
