"""Sort slots by expert on the device, stable, and cut each expert's rows into blocks of BLOCK_M."""

import triton
import triton.language as tl


@triton.jit
def load_experts(ids_ptr, slot, inside, E: tl.constexpr):
    """Return each slot's expert as int32; ids outside 0..E-1 become E, the bin of slots that are not routed."""
    expert = tl.load(ids_ptr + slot, mask=inside, other=-1)
    routed = (expert >= 0) & (expert < E)
    return tl.where(routed, expert, E).to(tl.int32)


@triton.jit
def write_slots(slots_ptr, expert, slot, inside, base, CHUNK: tl.constexpr):
    """Scatter one chunk of slots: position = base of its expert + how many earlier slots of the chunk share it."""
    index = tl.arange(0, CHUNK)
    same = (expert[:, None] == expert[None, :]) & (index[None, :] < index[:, None])
    position = tl.gather(base, expert, 0) + tl.sum(same.to(tl.int32), axis=1)
    tl.store(slots_ptr + position, slot, mask=inside)


@triton.jit
def write_blocks(
    counts, expert_offsets_ptr, block_expert_ptr, block_row_ptr, block_end_ptr, num_blocks_ptr,
    max_blocks, E: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Write the offsets and this program's share of the block table from the slot counts of all bins [BINS]."""
    bins = tl.arange(0, BINS)
    offsets = tl.cumsum(counts, 0) - counts
    blocks = tl.where(bins < E, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    block_stop = tl.cumsum(blocks, 0)
    total = tl.sum(blocks, 0)
    if tl.program_id(0) == 0:
        tl.store(expert_offsets_ptr + bins, offsets, mask=bins <= E)
        tl.store(num_blocks_ptr, total)
    for start in range(tl.program_id(0) * TABLE, max_blocks, tl.num_programs(0) * TABLE):
        block = start + tl.arange(0, TABLE)
        real = block < total
        # The owner of a block is the number of experts whose blocks end at or before it.
        expert = tl.sum((block_stop[None, :] <= block[:, None]).to(tl.int32), axis=1)
        expert = tl.where(real, expert, 0)
        first = tl.gather(block_stop, expert, 0) - tl.gather(blocks, expert, 0)
        row = tl.gather(offsets, expert, 0) + (block - first) * BLOCK_M
        end = tl.minimum(row + BLOCK_M, tl.gather(offsets, expert, 0) + tl.gather(counts, expert, 0))
        inside = block < max_blocks
        tl.store(block_expert_ptr + block, tl.where(real, expert, -1), mask=inside)
        tl.store(block_row_ptr + block, tl.where(real, row, 0), mask=inside)
        tl.store(block_end_ptr + block, tl.where(real, end, 0), mask=inside)


@triton.jit(do_not_specialize=["num_slots", "max_blocks"])
def permute_one_launch_kernel(
    ids_ptr,  # [S]
    slots_ptr, expert_offsets_ptr, block_expert_ptr, block_row_ptr, block_end_ptr, num_blocks_ptr,
    num_slots, max_blocks,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr, SCAN: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Every program counts all slots for itself, so that no program waits for another; grid [programs].

    Program p places the slots of chunk p and writes its share of the block table; programs past the last chunk only
    do the latter.
    """
    first = tl.program_id(0) * CHUNK
    before = tl.zeros([BINS], dtype=tl.int32)
    rest = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, num_slots, SCAN):
        slot = start + tl.arange(0, SCAN)
        expert = load_experts(ids_ptr, slot, slot < num_slots, E)
        if start < first:
            before += tl.histogram(expert, BINS, mask=(slot < num_slots) & (slot < first))
        if start + SCAN > first:
            rest += tl.histogram(expert, BINS, mask=(slot < num_slots) & (slot >= first))
    counts = before + rest
    slot = first + tl.arange(0, CHUNK)
    expert = load_experts(ids_ptr, slot, slot < num_slots, E)
    write_slots(slots_ptr, expert, slot, slot < num_slots, tl.cumsum(counts, 0) - counts + before, CHUNK)
    write_blocks(
        counts, expert_offsets_ptr, block_expert_ptr, block_row_ptr, block_end_ptr, num_blocks_ptr,
        max_blocks, E, BINS, BLOCK_M, TABLE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots"])
def permute_count_kernel(ids_ptr, counts_ptr, num_slots, E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """Count each chunk's slots per bin: counts [chunks, BINS]; grid [chunks]."""
    chunk = tl.program_id(0).to(tl.int64)
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = load_experts(ids_ptr, slot, slot < num_slots, E)
    counts = tl.histogram(expert, BINS, mask=slot < num_slots)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["num_chunks"])
def permute_scan_kernel(
    counts_ptr, totals_ptr, num_chunks, BINS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Turn counts [chunks, BINS] into exclusive sums over chunks, in place, and totals [BINS]; grid [BINS / COLUMNS]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    carried = tl.zeros([COLUMNS], dtype=tl.int32)
    for start in range(0, num_chunks, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        place = counts_ptr + row[:, None] * BINS + column[None, :]
        inside = (row < num_chunks)[:, None] & (column < BINS)[None, :]
        counts = tl.load(place, mask=inside, other=0)
        tl.store(place, carried[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
        carried += tl.sum(counts, 0)
    tl.store(totals_ptr + column, carried, mask=column < BINS)


@triton.jit(do_not_specialize=["num_slots", "max_blocks"])
def permute_scatter_kernel(
    ids_ptr, before_ptr, totals_ptr,  # [S], [chunks, BINS], [BINS]
    slots_ptr, expert_offsets_ptr, block_expert_ptr, block_row_ptr, block_end_ptr, num_blocks_ptr,
    num_slots, max_blocks,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Scatter each chunk from the scanned counts; grid [chunks]."""
    chunk = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    counts = tl.load(totals_ptr + bins)
    before = tl.load(before_ptr + chunk * BINS + bins)
    slot = (chunk * CHUNK).to(tl.int32) + tl.arange(0, CHUNK)
    expert = load_experts(ids_ptr, slot, slot < num_slots, E)
    write_slots(slots_ptr, expert, slot, slot < num_slots, tl.cumsum(counts, 0) - counts + before, CHUNK)
    write_blocks(
        counts, expert_offsets_ptr, block_expert_ptr, block_row_ptr, block_end_ptr, num_blocks_ptr,
        max_blocks, E, BINS, BLOCK_M, TABLE,
    )  # fmt: skip
