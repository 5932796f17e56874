"""What users call: the fused layer as torch custom ops, so that graphs and compilers see one opaque node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from moetune_kernels.errors import MoetuneError, ShapeError, UnsupportedConfigError, shown
from moetune_kernels.fused_moe.arguments import (
    check_activation,
    check_layer,
    check_no_gradients,
    check_one_device,
    check_out,
    check_router,
    check_routing,
    plan_text,
)
from moetune_kernels.fused_moe.layer import FORMATS, Weights, is_refusal, moe_from_ids, moe_from_logits
from moetune_kernels.plan import LayerPlan, plan_from_text
from moetune_kernels.route.launch import check_logits, check_top_k
from moetune_kernels.shape import MoEShape


def fused_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    plan: LayerPlan | None = None,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one Mixture-of-Experts layer on tokens that are routed already. For inference: there is no backward.

    Args:
        x: [T, H] bfloat16 or float16, T from 0 to 131,072; any strides (copied when not contiguous).
        w13: [E, 2I, H] gate rows, then up rows, in x's dtype; contiguous, starting on a multiple of 16 bytes.
        w2: [E, H, I], as w13.
        topk_weights: [T, K] float32; any strides.
        topk_ids: [T, K] int32 or int64; an id outside 0..E-1 is a slot that is not routed and adds nothing.
        activation: "silu": ``silu(gate) * up``.
        plan: launch choices; None takes the tuned table's, else the default plan.
        deterministic: ask for bitwise equal results on every run; every structure so far gives them.
        out: [T, H] to write to, sharing memory with no input; None allocates.

    Returns:
        [T, H] in x's dtype (``out`` when given).

    Raises:
        ShapeError: tensors that do not fit together.
        UnsupportedConfigError: a plan that cannot run this layer on this device.
        UnsupportedDeviceError: CPU tensors outside Triton's interpreter.
        MoetuneError: a backward pass, or ``out`` with an input that requires a gradient while gradients are on.

    Example:
        >>> topk_weights, topk_ids = moetune_kernels.route(logits, top_k=2)
        >>> y = moetune_kernels.fused_moe(x, w13, w2, topk_weights, topk_ids)
    """
    del deterministic  # the combine structure is a fixed-order sum: there is nothing to switch off
    check_activation(activation)
    text = plan_text(plan)
    check_one_device(x=x, w13=w13, w2=w2, topk_weights=topk_weights, topk_ids=topk_ids)
    if out is None:
        return _fused_moe_op(x, w13, w2, topk_weights, topk_ids, text)
    check_one_device(x=x, out=out)
    check_no_gradients(x=x, w13=w13, w2=w2, topk_weights=topk_weights, out=out)
    _fused_moe_out_op(x, w13, w2, topk_weights, topk_ids, text, out)
    return out


def fused_moe_forward(
    hidden_states: torch.Tensor,
    gate_weights: torch.Tensor,
    expert_weights: tuple[torch.Tensor, torch.Tensor],
    top_k: int = 2,
    renormalize: bool = True,
    *,
    plan: LayerPlan | None = None,
) -> torch.Tensor:
    """Run one Mixture-of-Experts layer, router included. For inference: there is no backward.

    Args:
        hidden_states: [T, H] bfloat16 or float16.
        gate_weights: [E, H] router weights in the same dtype; more rows than the experts here leave the rest unrouted.
        expert_weights: (w13 [E, 2I, H], w2 [E, H, I]), as :func:`fused_moe` takes them.
        top_k: experts per token, at most 16.
        renormalize: make a token's router weights sum to one.
        plan: launch choices; None takes the tuned table's, else the default plan.

    Returns:
        [T, H] in the dtype of ``hidden_states``.

    Raises:
        ShapeError, UnsupportedConfigError, UnsupportedDeviceError: as :func:`fused_moe`.
    """
    if not isinstance(expert_weights, (tuple, list)) or len(expert_weights) != 2:
        raise ShapeError(f"expert_weights must be the pair (w13, w2), got {type(expert_weights).__name__}")
    text, (w13, w2) = plan_text(plan), expert_weights
    check_one_device(hidden_states=hidden_states, gate_weights=gate_weights, w13=w13, w2=w2)
    check_router(hidden_states, gate_weights, top_k)
    logits = torch.nn.functional.linear(hidden_states, gate_weights)
    return _moe_from_logits_op(hidden_states, w13, w2, logits, top_k, bool(renormalize), text)


class FusedMoE(torch.nn.Module):
    """A Mixture-of-Experts layer with its router, for inference: tokens [..., H] in, tokens [..., H] out.

    Args:
        hidden: H.
        inter: I.
        num_experts: E.
        top_k: experts per token.
        renormalize: make a token's router weights sum to one.
        dtype: of all weights, bfloat16 or float16.
        device: of all weights.

    Raises:
        ShapeError: sizes or a dtype that the kernels do not take.
    """

    gate: torch.nn.Parameter
    w13: torch.nn.Parameter
    w2: torch.nn.Parameter

    def __init__(
        self,
        hidden: int,
        inter: int,
        num_experts: int,
        top_k: int = 2,
        *,
        renormalize: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dtype not in FORMATS:
            raise ShapeError(f"dtype must be bfloat16 or float16, got {shown(dtype)}")
        MoEShape(hidden=hidden, inter=inter, local_experts=num_experts, top_k=top_k, format=FORMATS[dtype])
        check_top_k(top_k, num_experts)
        self.top_k, self.renormalize = top_k, renormalize
        for name, size in (
            ("gate", (num_experts, hidden)),
            ("w13", (num_experts, 2 * inter, hidden)),
            ("w2", (num_experts, hidden, inter)),
        ):
            weight = torch.empty(size, dtype=dtype, device=device)
            torch.nn.init.normal_(weight, std=size[-1] ** -0.5)
            setattr(self, name, torch.nn.Parameter(weight, requires_grad=False))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, same shape and dtype as ``hidden_states`` [..., H]."""
        hidden = self.gate.shape[1]
        if hidden_states.ndim == 0 or hidden_states.shape[-1] != hidden:
            raise ShapeError(f"hidden_states must be [..., H={hidden}], got {tuple(hidden_states.shape)}")
        tokens = hidden_states.reshape(-1, hidden)
        out = fused_moe_forward(tokens, self.gate, (self.w13, self.w2), self.top_k, self.renormalize)
        return out.view(hidden_states.shape)


@torch.library.custom_op("moetune::fused_moe", mutates_args=())
def _fused_moe_op(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, plan: str
) -> torch.Tensor:
    check_layer(x, Weights(w13, w2))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run_into(x, Weights(w13, w2), (topk_weights, topk_ids), plan, out)
    return out


@_fused_moe_op.register_fake
def _(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, plan: str
):
    del w13, w2, topk_weights, topk_ids, plan
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("moetune::fused_moe_out", mutates_args=("out",))
def _fused_moe_out_op(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    plan: str,
    out: torch.Tensor,
) -> None:
    check_layer(x, Weights(w13, w2))
    inputs = {"x": x, "w13": w13, "w2": w2, "topk_weights": topk_weights, "topk_ids": topk_ids}
    check_out(out, x, inputs)
    _run_into(x, Weights(w13, w2), (topk_weights, topk_ids), plan, out)


@torch.library.custom_op("moetune::moe_from_logits", mutates_args=())
def _moe_from_logits_op(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, logits: torch.Tensor, top_k: int, renormalize: bool, plan: str
) -> torch.Tensor:
    weights = Weights(w13, w2)
    check_layer(x, weights)
    check_logits(logits, top_k)
    chosen = plan_from_text(plan) if plan else None
    with _refusals_named():
        return moe_from_logits(x.contiguous(), weights, logits.contiguous(), (top_k, renormalize), chosen)


@_moe_from_logits_op.register_fake
def _(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, logits: torch.Tensor, top_k: int, renormalize: bool, plan: str
):
    del w13, w2, logits, top_k, renormalize, plan
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _run_into(
    x: torch.Tensor, weights: Weights, topk: tuple[torch.Tensor, torch.Tensor], plan: str, out: torch.Tensor
) -> None:
    topk_weights, topk_ids = topk
    check_routing(x, topk_weights, topk_ids)
    chosen = plan_from_text(plan) if plan else None
    with _refusals_named():
        moe_from_ids(x.contiguous(), weights, (topk_weights.contiguous(), topk_ids.contiguous()), chosen, out)


@contextmanager
def _refusals_named() -> Iterator[None]:
    """Turn Triton's refusal to launch into an error of ours; a plan from a table was replaced before this."""
    try:
        yield
    except Exception as error:
        if not is_refusal(error):
            raise
        raise UnsupportedConfigError(f"the GPU refuses a kernel of the plan: {error}; give a smaller plan") from error


def _no_backward(ctx: Any, *gradients: Any) -> NoReturn:
    del ctx, gradients
    raise MoetuneError("the layer is for inference and has no backward: run it under torch.no_grad()")


_fused_moe_op.register_autograd(_no_backward)
_moe_from_logits_op.register_autograd(_no_backward)
