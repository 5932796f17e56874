"""Slots in expert order, and the table of row blocks that both grouped GEMMs walk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ALIGN = 16  # int32 elements: every part of the buffer starts on 64 bytes, so that kernels load it vectorised


@dataclass(frozen=True, slots=True)
class SlotOrder:
    """Where each slot stands once sorted by expert. Compact: no padding, position p holds exactly one slot.

    Args:
        slots: [S] slot id (t * K + k) at each position; routed slots first, by expert, then by slot id.
        expert_offsets: [E + 1] first position of each expert; the last entry counts the routed slots.
        block_expert: [B] expert that owns each row block; -1 where there is no such block.
        block_row: [B] first position of the block.
        block_end: [B] one past the block's last position.
        num_blocks: [1] how many blocks there are.
        block_m: most rows of a block.
    """

    slots: torch.Tensor
    expert_offsets: torch.Tensor
    block_expert: torch.Tensor
    block_row: torch.Tensor
    block_end: torch.Tensor
    num_blocks: torch.Tensor
    block_m: int

    @classmethod
    def empty(cls, num_slots: int, num_experts: int, block_m: int, device: torch.device | str) -> SlotOrder:
        """Allocate, sized by the shapes alone, so that a CUDA graph can hold it."""
        blocks = block_bound(num_slots, num_experts, block_m)
        sizes = (num_slots, num_experts + 1, blocks, blocks, blocks, 1)
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGN) * _ALIGN)
        buffer = torch.empty(starts[-1], dtype=torch.int32, device=device)
        parts = [buffer[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        return cls(*parts, block_m=block_m)

    @property
    def max_blocks(self) -> int:
        """B: the most blocks that any routing of this many slots can need."""
        return self.block_expert.numel()


def block_bound(num_slots: int, num_experts: int, block_m: int) -> int:
    """Return the most row blocks that ``num_slots`` can fall into: every touched expert may waste block_m - 1 rows."""
    touched = min(num_slots, num_experts)
    return (num_slots + touched * (block_m - 1)) // block_m
