"""One forward of the layer: allocate by shapes alone, then launch.

Launches: routing, gate-up, down, combine. Routing is one launch at up to 64 slots where this rank holds every expert that the
router scores, else the router's and permute's one (three above 4,096 slots); gate-up is two for ``tma_permute``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from moetune_kernels import debug
from moetune_kernels.combine.launch import combine_calls
from moetune_kernels.config import Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.down.launch import DownOperands, down_calls
from moetune_kernels.errors import UnsupportedConfigError
from moetune_kernels.fused_moe.routing import routing_calls
from moetune_kernels.gate_up.launch import gate_up_calls
from moetune_kernels.grid import device_of
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.kernel_call import KernelCall, launch_all
from moetune_kernels.launch_context import launching_on
from moetune_kernels.lookup import best_plan
from moetune_kernels.permute.launch import permute_calls
from moetune_kernels.permute.order import SlotOrder
from moetune_kernels.plan import LayerPlan
from moetune_kernels.serving_log import log_once, warn_once
from moetune_kernels.shape import MoEShape, WeightFormat

Calls = tuple[KernelCall, ...]
# By name: Triton's releases move these classes about, and a serving process must not fail to import for one.
_REFUSALS = {"OutOfResources", "PTXASError", "CompilationError"}
FORMATS = {torch.bfloat16: WeightFormat.BF16, torch.float16: WeightFormat.FP16}


@dataclass(frozen=True, slots=True)
class Weights:
    """One layer's dense weights: w13 [E, 2I, H] (gate rows, then up rows) and w2 [E, H, I]."""

    w13: torch.Tensor
    w2: torch.Tensor

    def shape(self, top_k: int) -> MoEShape:
        """Return the layer's key as the tensors of a call give it."""
        num_experts, hidden, inter = self.w2.shape
        return _shape(hidden, inter, num_experts, top_k, FORMATS[self.w2.dtype])


@lru_cache(maxsize=256)
def _shape(hidden: int, inter: int, num_experts: int, top_k: int, weight_format: WeightFormat) -> MoEShape:
    return MoEShape(
        hidden=hidden,
        inter=inter,
        local_experts=num_experts,
        experts=max(num_experts, top_k),
        top_k=top_k,
        format=weight_format,
    )


@lru_cache(maxsize=4096)
def _why_not(plan: LayerPlan, device: DeviceInfo, shape: MoEShape) -> str | None:
    return plan.why_not(device, shape)


def plan_for(weights: Weights, tokens: int, top_k: int, plan: LayerPlan | None) -> LayerPlan:
    """Return the caller's plan, checked, or the best one known.

    Raises:
        UnsupportedConfigError: the caller's plan cannot run this layer on this device.
    """
    shape, device = weights.shape(top_k), device_of(weights.w2)
    if plan is not None:
        reason = _why_not(plan, device, shape)
        if reason is not None:
            raise UnsupportedConfigError(f"the plan given cannot run {shape.key} on {device.name}: {reason}")
        return plan
    resolved = best_plan(shape, tokens, device)
    log_once(resolved, shape, tokens)
    if _refused and (resolved.plan, device, shape) in _refused:
        return heuristic_plan(shape, tokens, device)
    return resolved.plan


def is_refusal(error: Exception) -> bool:
    """Say whether Triton could not compile or load a kernel for this GPU: it was not launched, another plan may serve."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & _REFUSALS) or "PassManager::run failed" in str(error)


_refused: set[tuple[LayerPlan, DeviceInfo, MoEShape]] = set()  # plans from tables, refused in this process


def _serve(
    weights: Weights, tokens: int, top_k: int, given: LayerPlan | None, run: Callable[[LayerPlan], None]
) -> None:
    """Run with the plan given, else the best one known, else, where the GPU refuses that one, the default plan.

    Raises:
        UnsupportedConfigError: the plan given cannot run this layer on this device.
        Exception: Triton's own, where the plan given or the default plan is refused; see :func:`is_refusal`.
    """
    plan = plan_for(weights, tokens, top_k, given)
    try:
        run(plan)
    except Exception as error:
        shape, device = weights.shape(top_k), device_of(weights.w2)
        default = heuristic_plan(shape, tokens, device)
        if given is not None or plan == default or not is_refusal(error):
            raise
        _refused.add((plan, device, shape))
        warn_once(
            f"{device.name} refuses the tuned plan of {shape.key} at {tokens} tokens ({error}); "
            "the default plan serves; tune again with `moetune sweep`"
        )
        run(default)


def moe_from_logits(
    x: torch.Tensor, weights: Weights, logits: torch.Tensor, routing: tuple[int, bool], plan: LayerPlan | None = None
) -> torch.Tensor:
    """Run the layer from router logits.

    Args:
        x: [T, H] contiguous.
        weights: the experts.
        logits: [T, E] contiguous; more columns than the weights have experts leave those experts' slots unrouted.
        routing: (top_k, renormalize).
        plan: the launch choices; None looks them up.

    Returns:
        [T, H] in the dtype of x.
    """
    top_k, renormalize = routing
    tokens = x.shape[0]
    out = torch.empty_like(x)
    if tokens == 0:
        return out
    topk_weights = torch.empty((tokens, top_k), dtype=torch.float32, device=x.device)
    topk_ids = torch.empty((tokens, top_k), dtype=torch.int32, device=x.device)
    num_experts = weights.w2.shape[0]

    def run(plan: LayerPlan) -> None:
        order = SlotOrder.empty(tokens * top_k, num_experts, plan.block_m, x.device)
        calls = routing_calls(logits, (topk_weights, topk_ids), num_experts, order, renormalize=renormalize)
        _route(calls, topk_ids, logits.shape[1], order)
        _run_experts(x, weights, Routed(topk_weights, topk_ids, order), plan, out)

    with launching_on(x):
        _serve(weights, tokens, top_k, plan, run)
    return out


def moe_from_ids(
    x: torch.Tensor,
    weights: Weights,
    topk: tuple[torch.Tensor, torch.Tensor],
    plan: LayerPlan | None,
    out: torch.Tensor,
) -> None:
    """Run the layer from ``topk`` = (weights [T, K] float32, ids [T, K]), all contiguous, into ``out`` [T, H]."""
    topk_weights, topk_ids = topk
    if x.shape[0] == 0:
        return
    num_experts = weights.w2.shape[0]

    def run(plan: LayerPlan) -> None:
        order = SlotOrder.empty(topk_ids.numel(), num_experts, plan.block_m, x.device)
        _route(permute_calls(topk_ids, num_experts, order), topk_ids, num_experts, order)
        _run_experts(x, weights, Routed(topk_weights, topk_ids, order), plan, out)

    with launching_on(x):
        _serve(weights, x.shape[0], topk_ids.shape[1], plan, run)


@dataclass(frozen=True, slots=True)
class Routed:
    """Where every slot goes: topk_weights [T, K] float32, topk_ids [T, K], and their order by expert."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    order: SlotOrder


def _route(calls: Calls, topk_ids: torch.Tensor, known_experts: int, order: SlotOrder) -> None:
    """Launch the routing; ids may name any of ``known_experts``, of which this rank may hold only the first."""
    if debug.checks_wanted():
        debug.run_checked("routing", calls, lambda: order.expert_offsets[None])
        debug.check_ids(topk_ids, known_experts)
        return
    launch_all(calls)


def _run_experts(x: torch.Tensor, weights: Weights, routed: Routed, plan: LayerPlan, out: torch.Tensor) -> None:
    slots, (num_experts, hidden, inter) = routed.topk_ids.numel(), weights.w2.shape
    h = torch.empty((slots, inter), dtype=x.dtype, device=x.device)
    y = torch.empty((slots, hidden), dtype=x.dtype, device=x.device)
    order = routed.order
    first = gate_up_calls(x, weights.w13, order, h, plan.config(Role.GATE_UP))
    second = down_calls(DownOperands(h, weights.w2, routed.topk_weights, y), order, plan.config(Role.DOWN))
    last = combine_calls(y, routed.topk_ids, num_experts, out)
    if debug.checks_wanted():
        debug.run_checked("gate_up", first, lambda: debug.routed_rows(order, h))
        debug.run_checked("down", second, lambda: y[order.slots[: int(order.expert_offsets[-1])].long()])
        debug.run_checked("combine", last, lambda: out)
        return
    launch_all((*first, *second, *last))
