"""How many experts' weights fit, before anything is allocated."""

from __future__ import annotations

from moetune.errors import MissingError
from moetune_kernels.shape import ACTIVATION_BYTES, MoEShape

SPARE_BYTES = 3 << 30  # the timer's flush buffers (four times the L2), kernels, and what CUDA keeps for itself
_GIB = 1 << 30


def resident_experts(shape: MoEShape, tokens: int, free_bytes: int) -> int:
    """Return how many local experts' weights fit beside the activations of ``tokens`` tokens; all of them at most.

    Raises:
        MissingError: not even one expert fits.
    """
    room = free_bytes - SPARE_BYTES - activation_bytes(shape, tokens)
    fitting = min(room // shape.expert_bytes, shape.local_experts)
    if fitting < 1:
        raise MissingError(
            f"{shape.key} at {tokens} tokens needs {activation_bytes(shape, tokens) / _GIB:.1f} GiB for activations and "
            f"{shape.expert_bytes / _GIB:.2f} GiB per expert, {max(free_bytes - SPARE_BYTES, 0) / _GIB:.1f} GiB of GPU "
            "memory are free; give fewer --tokens, a larger --tp, or free the GPU"
        )
    return int(fitting)


def activation_bytes(shape: MoEShape, tokens: int) -> int:
    """Return the bytes of x, the copied rows, h, y and the output, twice: apart and inside the captured layer."""
    slots = tokens * shape.top_k
    elements = 2 * tokens * shape.hidden + 2 * slots * shape.hidden + slots * shape.inter
    return 2 * elements * ACTIVATION_BYTES


def sharing_note(shape: MoEShape, resident: int) -> str | None:
    """Return what the page says when experts share weights, or None when each has its own."""
    if resident >= shape.local_experts:
        return None
    return (
        f"GPU memory holds the weights of {resident} of {shape.local_experts} experts: expert e reads those of "
        f"e % {resident}. Tiles and padding are the layer's own; the layer's time is the sum of its parts"
    )
