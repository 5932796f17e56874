"""What MOETUNE_DEBUG=2 adds to a forward: checks after each kernel, the routing histogram and each kernel's time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

from moetune_kernels.errors import MoetuneError
from moetune_kernels.kernel_call import KernelCall, launch_all
from moetune_kernels.permute.order import SlotOrder

_LOG = logging.getLogger("moetune")


def checks_wanted() -> bool:
    """Whether each kernel is to be checked: MOETUNE_DEBUG=2, and not while a CUDA graph is captured (checks wait)."""
    if os.environ.get("MOETUNE_DEBUG", "") < "2":
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def run_checked(name: str, calls: tuple[KernelCall, ...], outputs: Callable[[], torch.Tensor]) -> None:
    """Launch, time, and check that every element of ``outputs()`` is finite.

    Raises:
        MoetuneError: the kernel wrote NaN or infinity, with the kernel, the row and the column.
    """
    if not torch.cuda.is_available():
        launch_all(calls)
    else:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch_all(calls)
        end.record()
        end.synchronize()
        _LOG.info("%s took %.1f us (eager, first launch compiles)", name, start.elapsed_time(end) * 1e3)
    found = outputs()
    bad = ~found.isfinite()
    if bool(bad.any()):
        row, column = (int(part) for part in bad.nonzero()[0])
        raise MoetuneError(
            f"{name} wrote {float(found[row, column])} at row {row}, column {column}, and {int(bad.sum())} such values "
            "in all; check the inputs for NaN or overflow, then the plan with `moetune check`"
        )


def check_ids(topk_ids: torch.Tensor, num_experts: int) -> None:
    """Log the routing histogram.

    Raises:
        MoetuneError: an id outside -1..E-1 (-1 is a slot that is not routed), with its token and slot.
    """
    wrong = (topk_ids < -1) | (topk_ids >= num_experts)
    if bool(wrong.any()):
        token, slot = (int(part) for part in wrong.nonzero()[0])
        raise MoetuneError(
            f"expert id {int(topk_ids[token, slot])} of token {token}, slot {slot} is outside 0..{num_experts - 1}; "
            "use -1 for a slot that is not routed"
        )
    flat = topk_ids.flatten().to(torch.int64)
    counts = torch.bincount(flat[flat >= 0], minlength=num_experts)
    _LOG.info(
        "routing: %d slots, %d experts touched, most %d and fewest %d slots of an expert, histogram %s",
        flat.numel(), int((counts > 0).sum()), int(counts.max()), int(counts.min()), counts.tolist(),
    )  # fmt: skip


def routed_rows(order: SlotOrder, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of h [S, I] that the kernels must have written."""
    return rows[: int(order.expert_offsets[-1])]
