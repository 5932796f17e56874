"""Slots in expert order, in plain torch."""

from __future__ import annotations

import torch

from moetune_kernels.permute.order import SlotOrder


def permute_reference(topk_ids: torch.Tensor, num_experts: int, block_m: int) -> SlotOrder:
    """Return what :func:`moetune_kernels.permute.permute` must write, unused block entries included."""
    flat = topk_ids.flatten().to(torch.int64)
    expert = flat.where((flat >= 0) & (flat < num_experts), torch.full_like(flat, num_experts))
    order = SlotOrder.empty(flat.numel(), num_experts, block_m, topk_ids.device)
    order.slots.copy_(torch.argsort(expert, stable=True))
    counts = torch.bincount(expert, minlength=num_experts + 1)[:num_experts]
    offsets = [0]
    for count in counts.tolist():
        offsets.append(offsets[-1] + count)
    order.expert_offsets.copy_(torch.tensor(offsets))
    order.block_expert.fill_(-1)
    order.block_row.zero_()
    order.block_end.zero_()
    block = 0
    for owner in range(num_experts):
        for row in range(offsets[owner], offsets[owner + 1], block_m):
            order.block_expert[block] = owner
            order.block_row[block] = row
            order.block_end[block] = min(row + block_m, offsets[owner + 1])
            block += 1
    order.num_blocks.fill_(block)
    return order
