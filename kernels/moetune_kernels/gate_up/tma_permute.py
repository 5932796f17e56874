"""Gate-up, persistent, everything by TMA: rows of x are first copied into expert order."""

import triton
import triton.language as tl

from moetune_kernels.gate_up.epilogue import store_swiglu
from moetune_kernels.raster import tile_of


@triton.jit(do_not_specialize=["num_slots"])
def permute_rows_kernel(
    x_ptr, rows_ptr, slots_ptr,  # [T, H], [S, H], [S]
    num_slots, H: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy ``rows[p] = x[slots[p] // K]``; grid [S / ROWS]."""
    position = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = position < num_slots
    row = (tl.load(slots_ptr + position, mask=inside, other=0) // K).to(tl.int64)
    for start in range(0, H, COLUMNS):
        cols = start + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (cols < H)[None, :]
        tile = tl.load(x_ptr + row[:, None] * H + cols[None, :], mask=mask)
        tl.store(rows_ptr + position[:, None] * H + cols[None, :], tile, mask=mask)


@triton.jit
def gate_up_tma_permute_kernel(
    rows_desc, w13_desc, h_ptr,  # [S, H] in blocks [BLOCK_M, BLOCK_K], [E * 2I, H] in blocks [BLOCK_N, BLOCK_K], [S, I]
    block_expert_ptr, block_row_ptr, block_end_ptr, num_blocks_ptr,  # [B], [B], [B], [1]
    H: tl.constexpr, I: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Walk the tiles with a stride of the grid; grid [programs that fit the device]."""
    COLUMNS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    num_blocks = tl.load(num_blocks_ptr)
    for tile in range(tl.program_id(0), num_blocks * COLUMNS, tl.num_programs(0)):
        block, column = tile_of(tile, num_blocks, COLUMNS, GROUP_M)
        expert = tl.load(block_expert_ptr + block)
        start = tl.load(block_row_ptr + block)
        gate_row = expert * (2 * I) + column * BLOCK_N
        gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in range(0, H, BLOCK_K):
            # Rows past the block's end belong to the next expert: computed, never stored.
            x = rows_desc.load([start, k])
            gate = tl.dot(x, w13_desc.load([gate_row, k]).T, gate)
            up = tl.dot(x, w13_desc.load([gate_row + I, k]).T, up)
        position = start + tl.arange(0, BLOCK_M)
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        store_swiglu(h_ptr, gate, up, position, tl.load(block_end_ptr + block), cols, I)
