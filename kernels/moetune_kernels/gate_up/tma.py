"""Gate-up, persistent: weights by TMA descriptor, rows of x gathered by pointer."""

import triton
import triton.language as tl

from moetune_kernels.gate_up.epilogue import store_swiglu
from moetune_kernels.raster import tile_of


@triton.jit
def gate_up_tma_kernel(
    x_ptr, w13_desc, h_ptr,  # [T, H], [E * 2I, H] in blocks [BLOCK_N, BLOCK_K], [S, I]
    slots_ptr, block_expert_ptr, block_row_ptr, block_end_ptr, num_blocks_ptr,  # [S], [B], [B], [B], [1]
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Walk the tiles with a stride of the grid; grid [programs that fit the device]."""
    COLUMNS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    num_blocks = tl.load(num_blocks_ptr)
    for tile in range(tl.program_id(0), num_blocks * COLUMNS, tl.num_programs(0)):
        block, column = tile_of(tile, num_blocks, COLUMNS, GROUP_M)
        expert = tl.load(block_expert_ptr + block)
        end = tl.load(block_end_ptr + block)
        position = tl.load(block_row_ptr + block) + tl.arange(0, BLOCK_M)
        row = (tl.load(slots_ptr + tl.minimum(position, end - 1)) // K).to(tl.int64)
        x_ptrs = x_ptr + row[:, None] * H + tl.arange(0, BLOCK_K)[None, :]
        gate_row = expert * (2 * I) + column * BLOCK_N
        gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in range(0, H, BLOCK_K):
            x = tl.load(x_ptrs + k)
            gate = tl.dot(x, w13_desc.load([gate_row, k]).T, gate)
            up = tl.dot(x, w13_desc.load([gate_row + I, k]).T, up)
        store_swiglu(h_ptr, gate, up, position, end, column * BLOCK_N + tl.arange(0, BLOCK_N), I)
