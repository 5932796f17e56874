"""Down by pointers: rows of h in expert order, outputs scattered to their slots."""

import triton
import triton.language as tl

from moetune_kernels.down.epilogue import store_weighted
from moetune_kernels.raster import tile_of


@triton.jit
def down_gather_kernel(
    h_ptr, w2_ptr, y_ptr, topk_weights_ptr,  # [S, I], [E, H, I], [S, H], [S]
    slots_ptr, block_expert_ptr, block_row_ptr, block_end_ptr, num_blocks_ptr,  # [S], [B], [B], [B], [1]
    H: tl.constexpr, I: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Compute ``y[slot] = weight[slot] * (h @ w2.T)`` for one tile; grid [B * columns], surplus programs leave."""
    COLUMNS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    num_blocks = tl.load(num_blocks_ptr)
    if tl.program_id(0) >= num_blocks * COLUMNS:
        return
    block, column = tile_of(tl.program_id(0), num_blocks, COLUMNS, GROUP_M)
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    end = tl.load(block_end_ptr + block)
    position = tl.load(block_row_ptr + block) + tl.arange(0, BLOCK_M)
    # Rows past the block's end repeat its last row: loads need no mask, the store leaves them out.
    row = tl.minimum(position, end - 1).to(tl.int64)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    weight_row = cols if H % BLOCK_N == 0 else tl.minimum(cols, H - 1)
    h_ptrs = h_ptr + row[:, None] * I + inner[None, :]
    w2_ptrs = w2_ptr + expert * (H * I) + weight_row[None, :] * I + inner[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, I, BLOCK_K):
        if I % BLOCK_K == 0:
            h = tl.load(h_ptrs)
            w2 = tl.load(w2_ptrs)
        else:
            h = tl.load(h_ptrs, mask=inner[None, :] < I - k, other=0.0)
            w2 = tl.load(w2_ptrs, mask=inner[:, None] < I - k, other=0.0)
        acc = tl.dot(h, w2, acc)
        h_ptrs += BLOCK_K
        w2_ptrs += BLOCK_K
    store_weighted(y_ptr, acc, topk_weights_ptr, slots_ptr, position, end, cols, H)
