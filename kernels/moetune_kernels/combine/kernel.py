"""Sum each token's expert outputs in float32."""

import triton
import triton.language as tl


@triton.jit
def combine_kernel(
    y_ptr, ids_ptr, out_ptr,  # [S, H], [T, K], [T, H]
    E: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Write ``out[t] = sum over k of y[t * K + k]``; slots that are not routed add nothing; grid [T, H / BLOCK_H]."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + token * K + k)
        routed = (expert >= 0) & (expert < E)
        # The row of a slot that is not routed was never written: it may hold NaN, so it is not read.
        total += tl.load(y_ptr + (token * K + k) * H + cols, mask=routed & (cols < H), other=0.0).to(tl.float32)
    tl.store(out_ptr + token * H + cols, total.to(out_ptr.dtype.element_ty), mask=cols < H)
