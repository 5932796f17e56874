"""Gate-up by pointers: rows of x gathered by slot, gate and up tiles side by side, SwiGLU in the epilogue."""

import triton
import triton.language as tl

from moetune_kernels.gate_up.epilogue import store_swiglu
from moetune_kernels.raster import tile_of


@triton.jit
def gate_up_gather_kernel(
    x_ptr, w13_ptr, h_ptr,  # [T, H], [E, 2I, H], [S, I]
    slots_ptr, block_expert_ptr, block_row_ptr, block_end_ptr, num_blocks_ptr,  # [S], [B], [B], [B], [1]
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Compute ``h = silu(x @ gate.T) * (x @ up.T)`` for one tile; grid [B * columns], surplus programs leave."""
    COLUMNS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    num_blocks = tl.load(num_blocks_ptr)
    if tl.program_id(0) >= num_blocks * COLUMNS:
        return
    block, column = tile_of(tl.program_id(0), num_blocks, COLUMNS, GROUP_M)
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    end = tl.load(block_end_ptr + block)
    position = tl.load(block_row_ptr + block) + tl.arange(0, BLOCK_M)
    # Rows past the block's end repeat its last row: loads need no mask, the store leaves them out.
    row = (tl.load(slots_ptr + tl.minimum(position, end - 1)) // K).to(tl.int64)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    weight_row = cols if I % BLOCK_N == 0 else tl.minimum(cols, I - 1)
    x_ptrs = x_ptr + row[:, None] * H + inner[None, :]
    gate_ptrs = w13_ptr + expert * (2 * I * H) + weight_row[None, :] * H + inner[:, None]
    up_ptrs = gate_ptrs + I * H
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, H, BLOCK_K):
        if H % BLOCK_K == 0:
            x = tl.load(x_ptrs)
            w_gate = tl.load(gate_ptrs)
            w_up = tl.load(up_ptrs)
        else:
            x = tl.load(x_ptrs, mask=inner[None, :] < H - k, other=0.0)
            w_gate = tl.load(gate_ptrs, mask=inner[:, None] < H - k, other=0.0)
            w_up = tl.load(up_ptrs, mask=inner[:, None] < H - k, other=0.0)
        gate = tl.dot(x, w_gate, gate)
        up = tl.dot(x, w_up, up)
        x_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K
        up_ptrs += BLOCK_K
    store_swiglu(h_ptr, gate, up, position, end, cols, I)
