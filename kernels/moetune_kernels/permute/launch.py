"""Put slots in expert order: one launch for few slots, three for many; never a host synchronisation."""

from __future__ import annotations

import torch

from moetune_kernels.config import BLOCK_SIZES
from moetune_kernels.errors import ShapeError, shown
from moetune_kernels.kernel_call import KernelCall, launch_all
from moetune_kernels.launch_context import check_device, check_tensor, launching_on
from moetune_kernels.permute.kernel import (
    permute_count_kernel,
    permute_one_launch_kernel,
    permute_scan_kernel,
    permute_scatter_kernel,
)
from moetune_kernels.permute.order import SlotOrder
from moetune_kernels.shape import MAX_EXPERTS, MAX_TOKENS, MAX_TOP_K

# Above this, recounting all slots in every program costs more than two more launches: 8,192 slots of 128 experts took
# 15 us in one launch and 13 us in three, 2,048 took 10 us and 13 us (H200).
ONE_LAUNCH_SLOTS = 4096
CHUNK = 128  # slots of one program; ranks inside a chunk compare all its pairs
SCAN = 1024  # slots counted in one step
TABLE = 16  # blocks written in one step
SCAN_ROWS, SCAN_COLUMNS = 64, 32
MAX_PROGRAMS = 132  # one wave on an H200: more programs for the block table would only recount the slots more often


def permute(topk_ids: torch.Tensor, num_experts: int, block_m: int) -> SlotOrder:
    """Sort slots by expert and cut them into row blocks.

    Args:
        topk_ids: [T, K] int32 or int64 expert of each slot, at most 131,072 x 16 of them; any strides; an id outside
            0..E-1 is a slot that is not routed.
        num_experts: E, at most 1024.
        block_m: most rows of a block, a power of two from 16 to 256.

    Raises:
        ShapeError: ids that are not [T, K] integers, or sizes out of range.
        UnsupportedDeviceError: CPU tensors outside Triton's interpreter.
    """
    check_tensor(topk_ids, "topk_ids")
    if topk_ids.ndim != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
        raise ShapeError(f"topk_ids must be [T, K] int32 or int64, got {tuple(topk_ids.shape)} {topk_ids.dtype}")
    if topk_ids.numel() > MAX_TOKENS * MAX_TOP_K:
        raise ShapeError(
            f"topk_ids has {topk_ids.numel():,} slots, at most {MAX_TOKENS * MAX_TOP_K:,} are ordered at once"
        )
    if type(num_experts) is not int or not 1 <= num_experts <= MAX_EXPERTS:
        raise ShapeError(f"num_experts must be a whole number from 1 to {MAX_EXPERTS}, got {shown(num_experts)}")
    if type(block_m) is not int or block_m not in BLOCK_SIZES:
        raise ShapeError(f"block_m must be one of {', '.join(map(str, BLOCK_SIZES))}, got {shown(block_m)}")
    check_device(topk_ids, "topk_ids")
    order = SlotOrder.empty(topk_ids.numel(), num_experts, block_m, topk_ids.device)
    with launching_on(topk_ids):
        launch_all(permute_calls(topk_ids.contiguous(), num_experts, order))
    return order


def permute_calls(topk_ids: torch.Tensor, num_experts: int, order: SlotOrder) -> tuple[KernelCall, ...]:
    """Return the launches that fill ``order`` from contiguous ``topk_ids`` [T, K]."""
    num_slots = topk_ids.numel()
    if num_slots == 0:
        order.expert_offsets.zero_()
        order.num_blocks.zero_()
        return ()
    bins = 1 << num_experts.bit_length()  # a power of two above E: one more bin for slots that are not routed
    outputs = (
        order.slots, order.expert_offsets, order.block_expert, order.block_row, order.block_end, order.num_blocks,
    )  # fmt: skip
    sizes = (num_slots, order.max_blocks, num_experts, bins, order.block_m)
    chunks = -(-num_slots // CHUNK)
    if num_slots <= ONE_LAUNCH_SLOTS:
        args = (topk_ids, *outputs, *sizes, CHUNK, SCAN, TABLE)
        programs = max(chunks, min(-(-order.max_blocks // TABLE), MAX_PROGRAMS))
        return (KernelCall(permute_one_launch_kernel, (programs,), args, {"num_warps": 4}),)
    counts = torch.empty((chunks, bins), dtype=torch.int32, device=topk_ids.device)
    totals = torch.empty(bins, dtype=torch.int32, device=topk_ids.device)
    columns = min(SCAN_COLUMNS, bins)
    return (
        KernelCall(permute_count_kernel, (chunks,), (topk_ids, counts, num_slots, num_experts, bins, CHUNK), {}),
        KernelCall(permute_scan_kernel, (bins // columns,), (counts, totals, chunks, bins, SCAN_ROWS, columns), {}),
        KernelCall(permute_scatter_kernel, (chunks,), (topk_ids, counts, totals, *outputs, *sizes, CHUNK, TABLE), {}),
    )
