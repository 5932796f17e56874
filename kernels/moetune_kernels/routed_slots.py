"""Which slots every expert owns, in plain torch: what the references walk, expert by expert."""

from __future__ import annotations

import torch


def routed_slots(topk_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the routed slots by expert, then by slot id, and how many each expert owns.

    Waits for the device once, however many experts there are; asked one by one, each would cost a wait.

    Args:
        topk_ids: [T, K], ids outside 0..E-1 are not routed.
        num_experts: E.

    Returns:
        slots [R] int64 on the device of the ids, to be split by the E counts beside it.
    """
    flat = topk_ids.flatten().long()
    owner = flat.masked_fill((flat < 0) | (flat >= num_experts), num_experts)
    # Not bincount, which waits for the smallest and the largest value before it counts.
    owned = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts = owned.scatter_add_(0, owner, torch.ones_like(owner))[:num_experts].tolist()
    return torch.argsort(owner, stable=True)[: sum(counts)], tuple(counts)
