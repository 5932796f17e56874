"""What every gate-up structure does with its two accumulators."""

import triton
import triton.language as tl


@triton.jit
def store_swiglu(h_ptr, gate, up, position, end, cols, I: tl.constexpr):
    """Store ``silu(gate) * up`` [BLOCK_M, BLOCK_N] to h [S, I], rows before ``end`` and columns before I only."""
    h = gate / (1.0 + tl.exp(-gate)) * up
    mask = (position < end)[:, None] & (cols < I)[None, :]
    place = h_ptr + position.to(tl.int64)[:, None] * I + cols[None, :]
    tl.store(place, h.to(h_ptr.dtype.element_ty), mask=mask)
