"""The page of a device that is not here: least work, bounds, tiles, padding, and what the compiler says. Nothing is timed."""

from __future__ import annotations

from collections.abc import Mapping

from moetune.errors import MoetuneError
from moetune.models.roofline import bound_us, layer_work, limit, nominal_peaks
from moetune.outcome import Compiled, Figure, Source
from moetune.profiling.analytical import ROLES, Load, parts_of
from moetune.profiling.facts import Facts
from moetune.profiling.kernel import kernel_profile
from moetune.profiling.page import Ceilings, LayerProfile, TokenProfile
from moetune.profiling.plans import Chosen, choose_plans
from moetune.profiling.request import ProfileRequest
from moetune.profiling.versions import versions
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import TARGETS, DeviceInfo

Choice = tuple[Role, MoEKernelConfig]
NOT_RUN = "analytical page: nothing ran on this device"


def analytical_profile(request: ProfileRequest, target: str, note: str) -> LayerProfile:
    """Return the page of ``TARGETS[target]``, computed and compiled only.

    Args:
        request: what to profile.
        target: the device's name in ``TARGETS``.
        note: why nothing ran, in a sentence for the page's head.
    """
    device = TARGETS[target]
    peaks = nominal_peaks(device)
    assert peaks is not None  # every target has a data sheet, tests/profiling/test_target.py checks
    ceilings = Ceilings(nominal_bytes_per_s=peaks.bytes_per_s, nominal_flops=peaks.flops)
    plans = choose_plans(request, device)
    compiled, complaint = _compile(request, device, plans)
    notes = [note, f"bounds from {peaks.source}; uniform routing is assumed"]
    return LayerProfile(
        shape=request.shape,
        device=device,
        measured=False,
        ceilings=ceilings,
        versions=versions(),
        command=request.command,
        tokens=tuple(_token_profile(request, device, ceilings, chosen, compiled) for chosen in plans),
        notes=tuple(notes if complaint is None else [*notes, complaint]),
        counters_missing=NOT_RUN,
    )


def _token_profile(
    request: ProfileRequest,
    device: DeviceInfo,
    ceilings: Ceilings,
    chosen: Chosen,
    compiled: Mapping[Choice, Compiled],
) -> TokenProfile:
    load = Load.expected(request.shape, chosen.tokens)
    work = layer_work(request.shape, chosen.tokens)
    peaks = nominal_peaks(device)
    kernels = []
    for part in parts_of(chosen.plan):
        role = ROLES.get(part)
        facts = Facts(
            device=device,
            ceilings=ceilings,
            clock_hz=peaks.sm_clock_hz if peaks else None,
            load=load,
            part=part,
            plan=chosen.plan,
            compiled=compiled.get((role, chosen.plan.config(role))) if role else None,
            why_no_time=NOT_RUN,
            why_no_counters=NOT_RUN,
        )
        kernels.append(kernel_profile(facts))
    return TokenProfile(
        tokens=chosen.tokens,
        plan=chosen.plan,
        plan_source=chosen.source,
        touched_experts=load.touched,
        layer_time_us=Figure.unavailable(NOT_RUN),
        bound_us=Figure(bound_us(work, ceilings.bytes_per_s, ceilings.flops), Source.ANALYTICAL),
        limit=limit(work, ceilings.bytes_per_s, ceilings.flops),
        kernels=tuple(kernels),
    )


def _compile(
    request: ProfileRequest, device: DeviceInfo, plans: tuple[Chosen, ...]
) -> tuple[dict[Choice, Compiled], str | None]:
    """Compile the GEMMs for the device; without a compiler the page is the poorer, not gone."""
    from moetune.measure.offline import compile_offline, plan_choices

    try:
        choices = plan_choices(chosen.plan for chosen in plans)
        ended = list(compile_offline(request.shape, device, choices))
    except (MoetuneError, OSError) as error:
        return {}, f"not compiled for {device.name}: {error}"
    compiled = {choice: outcome for choice, outcome in ended if isinstance(outcome, Compiled)}
    failed = next((outcome for _, outcome in ended if not isinstance(outcome, Compiled)), None)
    return compiled, None if failed is None else f"a kernel did not compile for {device.name}: {failed.reason}"
