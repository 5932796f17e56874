"""``moetune profile`` from Python."""

from __future__ import annotations

from collections.abc import Sequence

from moetune.profiling.page import LayerProfile
from moetune.profiling.request import DEFAULT_TOKENS, ProfileRequest
from moetune.profiling.run import profile
from moetune_kernels.shape import MoEShape


def profile_moe_kernel(
    hidden_dim: int = 4096,
    expert_dim: int = 14336,
    num_experts: int = 64,
    top_k: int = 2,
    *,
    tokens: Sequence[int] = DEFAULT_TOKENS,
    target: str | None = None,
) -> LayerProfile:
    """Profile a bf16 layer as ``moetune profile`` does; ``print`` the result to see the page.

    For a plan, weight format or device of your own, pass a :class:`~moetune.profiling.ProfileRequest` to
    :func:`moetune.profiling.profile`.

    Args:
        hidden_dim: H, the model width.
        expert_dim: I, the intermediate size of one expert.
        num_experts: E.
        top_k: experts per token.
        tokens: token counts.
        target: a device to compute the page for without running anything, e.g. ``sm_90``; None takes the GPU here.

    Returns:
        The page; ``to_json()`` gives it as plain values.

    Raises:
        ShapeError, UsageError: sizes that make no layer.
        MissingError: the GPU has no room for even one expert.
        RunError: a kernel failed.

    Example:
        >>> profile_moe_kernel(hidden_dim=2048, expert_dim=768, num_experts=128, top_k=8, target="sm_90").measured
        False
    """
    shape = MoEShape(hidden=hidden_dim, inter=expert_dim, local_experts=num_experts, top_k=top_k)
    return profile(ProfileRequest(shape=shape, tokens=tuple(tokens), target=target))
