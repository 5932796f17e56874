"""Which tile a program computes: shared by every grouped GEMM."""

import triton
import triton.language as tl


@triton.jit
def tile_of(tile, num_blocks, COLUMNS: tl.constexpr, GROUP_M: tl.constexpr):
    """Return (row block, column block) of a tile number: GROUP_M row blocks share one pass over the COLUMNS."""
    in_group = GROUP_M * COLUMNS
    first = (tile // in_group) * GROUP_M
    rows = tl.minimum(num_blocks - first, GROUP_M)
    inside = tile % in_group
    return first + inside % rows, inside // rows
