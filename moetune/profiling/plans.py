"""Which plan each token count is profiled with, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass

from moetune.errors import UsageError
from moetune.profiling.request import PlanChoice, ProfileRequest
from moetune_kernels.device import DeviceInfo
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.lookup import best_plan
from moetune_kernels.plan import LayerPlan


@dataclass(frozen=True, slots=True)
class Chosen:
    """One token count's plan; ``source`` is a sentence, ``tuned`` says whether a table gave it."""

    tokens: int
    plan: LayerPlan
    source: str
    tuned: bool


def choose_plans(request: ProfileRequest, device: DeviceInfo) -> tuple[Chosen, ...]:
    """Return a plan per token count, each of which can run on ``device``.

    Raises:
        UsageError: a plan that was given cannot run the layer on this device.
    """
    return tuple(_choose(request, tokens, device) for tokens in request.tokens)


def _choose(request: ProfileRequest, tokens: int, device: DeviceInfo) -> Chosen:
    choice = request.plan_choice
    if isinstance(choice, LayerPlan):
        reason = choice.why_not(device, request.shape)
        if reason is not None:
            raise UsageError(f"the plan given cannot run {request.shape.key} on {device.name}: {reason}")
        return Chosen(tokens, choice, "the plan given", tuned=False)
    if choice is PlanChoice.DEFAULT:
        return Chosen(tokens, heuristic_plan(request.shape, tokens, device), "the default plan, as asked", tuned=False)
    resolved = best_plan(request.shape, tokens, device)
    return Chosen(tokens, resolved.plan, resolved.why, tuned=resolved.source != "heuristic")
