"""What every down structure does with its accumulator."""

import triton
import triton.language as tl


@triton.jit
def store_weighted(y_ptr, acc, topk_weights_ptr, slots_ptr, position, end, cols, H: tl.constexpr):
    """Store ``acc * router weight`` [BLOCK_M, BLOCK_N] to the rows of y [S, H] that the slots name."""
    inside = position < end
    slot = tl.load(slots_ptr + position, mask=inside, other=0)
    weight = tl.load(topk_weights_ptr + slot, mask=inside, other=0.0)
    place = y_ptr + slot.to(tl.int64)[:, None] * H + cols[None, :]
    y = (acc * weight[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(place, y, mask=inside[:, None] & (cols < H)[None, :])
