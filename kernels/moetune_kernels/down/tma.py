"""Down, persistent: rows and weights by TMA descriptor, outputs scattered to their slots by pointer."""

import triton
import triton.language as tl

from moetune_kernels.down.epilogue import store_weighted
from moetune_kernels.raster import tile_of


@triton.jit
def down_tma_kernel(
    h_desc, w2_desc, y_ptr, topk_weights_ptr,  # [S, I] and [E * H, I] in blocks, [S, H], [S]
    slots_ptr, block_expert_ptr, block_row_ptr, block_end_ptr, num_blocks_ptr,  # [S], [B], [B], [B], [1]
    H: tl.constexpr, I: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Walk the tiles with a stride of the grid; grid [programs that fit the device]."""
    COLUMNS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    num_blocks = tl.load(num_blocks_ptr)
    for tile in range(tl.program_id(0), num_blocks * COLUMNS, tl.num_programs(0)):
        block, column = tile_of(tile, num_blocks, COLUMNS, GROUP_M)
        expert = tl.load(block_expert_ptr + block)
        start = tl.load(block_row_ptr + block)
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in range(0, I, BLOCK_K):
            # Rows past the block's end belong to the next expert: computed, never stored.
            h = h_desc.load([start, k])
            acc = tl.dot(h, w2_desc.load([expert * H + column * BLOCK_N, k]).T, acc)
        position = start + tl.arange(0, BLOCK_M)
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        end = tl.load(block_end_ptr + block)
        store_weighted(y_ptr, acc, topk_weights_ptr, slots_ptr, position, end, cols, H)
