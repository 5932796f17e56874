"""Every rule on what a caller may pass to the layer, each with its sentence."""

from __future__ import annotations

import torch

from moetune_kernels.errors import MoetuneError, ShapeError, UnsupportedConfigError, shown
from moetune_kernels.fused_moe.layer import FORMATS, Weights
from moetune_kernels.launch_context import check_device, check_tensor
from moetune_kernels.plan import LayerPlan
from moetune_kernels.route.launch import check_top_k
from moetune_kernels.shape import MAX_EXPERTS, MAX_TOKENS, MAX_TOP_K

ACTIVATIONS = ("silu",)
ALIGNMENT = 16  # bytes: what TMA descriptors demand of a tensor's start, and vector loads want


def check_activation(activation: str) -> None:
    """Raise ShapeError for an activation that no kernel computes; there is no silent fallback."""
    if activation not in ACTIVATIONS:
        raise ShapeError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {shown(activation)}")


def plan_text(plan: LayerPlan | None) -> str:
    """Return what the custom ops take for a plan: its text, empty for None; raises UnsupportedConfigError for others."""
    if plan is None:
        return ""
    if not isinstance(plan, LayerPlan):  # pyright: ignore[reportUnnecessaryIsInstance] - says so instead of failing later
        raise UnsupportedConfigError(f"plan must be a LayerPlan or None, got {shown(plan)}; see LayerPlan.from_json")
    return plan.text


def check_one_device(**tensors: torch.Tensor) -> None:
    """Raise ShapeError for what is no tensor, or not on the first one's device.

    Asked before the custom op: one weight left on ``meta`` would send the whole call to the fake kernel.
    """
    first, device = "", None
    for name, tensor in tensors.items():
        check_tensor(tensor, name)
        if device is None:
            first, device = name, tensor.device
        if tensor.device != device:
            raise ShapeError(f"{name} is on {tensor.device}, {first} on {device}; move them to one device")


def check_router(hidden_states: torch.Tensor, gate_weights: torch.Tensor, top_k: int) -> None:
    """Raise ShapeError where hidden_states [T, H] and gate_weights [E, H] cannot make logits."""
    if hidden_states.ndim != 2 or gate_weights.ndim != 2 or gate_weights.shape[1] != hidden_states.shape[1]:
        raise ShapeError(
            "hidden_states must be [T, H] and gate_weights [E, H], "
            f"got {tuple(hidden_states.shape)} and {tuple(gate_weights.shape)}"
        )
    if gate_weights.dtype != hidden_states.dtype:
        raise ShapeError(f"gate_weights must be {hidden_states.dtype} like hidden_states, got {gate_weights.dtype}")
    check_top_k(top_k, gate_weights.shape[0])


def check_no_gradients(**tensors: torch.Tensor) -> None:
    """Raise MoetuneError where ``out`` would silently cut a gradient: the layer is for inference."""
    wanting = [name for name, tensor in tensors.items() if tensor.requires_grad]
    if wanting and torch.is_grad_enabled():
        raise MoetuneError(
            f"{', '.join(wanting)} requires a gradient, and the layer has none: run it under torch.no_grad()"
        )


def check_layer(x: torch.Tensor, weights: Weights) -> None:
    """Raise where x [T, H], w13 [E, 2I, H] and w2 [E, H, I] do not fit together or cannot run here."""
    check_device(x, "x")
    _check_sizes(x, weights)
    for name, tensor in (("w13", weights.w13), ("w2", weights.w2)):
        if tensor.dtype != x.dtype or x.dtype not in FORMATS:
            raise ShapeError(f"x and {name} must both be bfloat16 or both float16, got {x.dtype} and {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ShapeError(
                f"{name} must be contiguous, got strides {tensor.stride()}; call .contiguous() once at load"
            )
        if tensor.device != x.device:
            raise ShapeError(f"{name} is on {tensor.device}, x on {x.device}; move them to one device")
        if tensor.data_ptr() % ALIGNMENT:
            raise ShapeError(
                f"{name} must start on a multiple of {ALIGNMENT} bytes, it starts {tensor.data_ptr() % ALIGNMENT} past one; "
                "call .clone() once at load"
            )


def _check_sizes(x: torch.Tensor, weights: Weights) -> None:
    shapes = tuple(x.shape), tuple(weights.w13.shape), tuple(weights.w2.shape)
    if [len(shape) for shape in shapes] != [2, 3, 3]:
        raise ShapeError("x must be [T, H], w13 [E, 2I, H], w2 [E, H, I]; got {}, {}, {}".format(*shapes))
    experts, hidden, inter = shapes[2]
    if shapes[1] != (experts, 2 * inter, hidden):
        raise ShapeError(f"w13 must be [E, 2I, H] = {(experts, 2 * inter, hidden)} for w2 {shapes[2]}, got {shapes[1]}")
    if shapes[0][1] != hidden:
        raise ShapeError(f"x has {shapes[0][1]} columns, the weights take H={hidden}")
    if not 1 <= experts <= MAX_EXPERTS:
        raise ShapeError(f"weights must have 1 to {MAX_EXPERTS} experts, got {experts}")
    if shapes[0][0] > MAX_TOKENS:
        raise ShapeError(f"x has {shapes[0][0]} tokens, at most {MAX_TOKENS} run in one call; split the batch")


def check_routing(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Raise ShapeError where topk_weights and topk_ids are not [T, K] of the right kind."""
    if topk_ids.ndim != 2 or topk_ids.shape[0] != x.shape[0] or topk_weights.shape != topk_ids.shape:
        raise ShapeError(
            f"topk_weights and topk_ids must both be [T={x.shape[0]}, K], "
            f"got {tuple(topk_weights.shape)} and {tuple(topk_ids.shape)}"
        )
    if topk_weights.dtype != torch.float32 or topk_ids.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            f"topk_weights must be float32 and topk_ids int32 or int64, got {topk_weights.dtype} and {topk_ids.dtype}"
        )
    if not 1 <= topk_ids.shape[1] <= MAX_TOP_K:
        raise ShapeError(f"topk_ids must have 1 to {MAX_TOP_K} columns, got {topk_ids.shape[1]}")
    for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        if tensor.device != x.device:
            raise ShapeError(f"{name} is on {tensor.device}, x on {x.device}; move them to one device")


def check_out(out: torch.Tensor, x: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
    """Raise ShapeError where ``out`` is not a contiguous twin of x, or shares memory with an input."""
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise ShapeError(
            f"out must be contiguous {tuple(x.shape)} {x.dtype} on {x.device}, "
            f"got {tuple(out.shape)} {out.dtype} on {out.device} with strides {out.stride()}"
        )
    start, end = _extent(out)
    for name, tensor in inputs.items():
        low, high = _extent(tensor)
        if low < end and start < high:
            raise ShapeError(f"out shares memory with {name}; give it memory of its own")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address range that a tensor's elements lie in."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
