"""Softmax top-k over experts; for few slots also their order by expert, in the same launch."""

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-2147483648)  # below the key of every float, -inf included


@triton.jit
def ordered_key(value):
    """Map float32 to int32 so that integers compare as the floats do; decoding is the same map."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def select_experts(logits, inside, K: tl.constexpr, COLUMNS: tl.constexpr, RENORMALIZE: tl.constexpr):
    """Return weights and ids [rows, COLUMNS] (K of them real) of logits [rows, experts].

    NaN counts as -inf. Equal logits go to the lowest id. Chosen ids are always distinct and in range.
    """
    value = logits.to(tl.float32)
    value = tl.where((value == value) & inside, value, float("-inf"))
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 and 0.0 are one logit
    top = tl.max(value, axis=1)
    # A row whose best is +inf shares its weight among the infinities; one without a finite logit has weight zero.
    infinite = top == float("inf")
    none = top == float("-inf")
    safe_top = tl.where(infinite | none, 0.0, top)
    share = tl.where(infinite[:, None], (value == float("inf")).to(tl.float32), tl.exp(value - safe_top[:, None]))
    total = tl.sum(share, axis=1)

    experts = tl.arange(0, logits.shape[1])
    columns = tl.arange(0, COLUMNS)
    key = tl.where(inside, ordered_key(value), LOWEST)
    weights = tl.zeros([logits.shape[0], COLUMNS], dtype=tl.float32)
    ids = tl.zeros([logits.shape[0], COLUMNS], dtype=tl.int32)
    chosen = tl.zeros([logits.shape[0]], dtype=tl.float32)
    for k in tl.static_range(K):
        best, winner = tl.max(key, axis=1, return_indices=True)
        picked = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        weight = tl.where(infinite, (picked == float("inf")).to(tl.float32), tl.exp(picked - safe_top))
        chosen += weight
        weights = tl.where(columns[None, :] == k, weight[:, None], weights)
        ids = tl.where(columns[None, :] == k, winner[:, None].to(tl.int32), ids)
        key = tl.where(experts[None, :] == winner[:, None], LOWEST, key)
    if RENORMALIZE:
        total = chosen
    weights = weights / tl.where(total > 0.0, total, 1.0)[:, None]
    return weights, ids


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits_ptr, weights_ptr, ids_ptr,  # [T, E], [T, K], [T, K]
    num_tokens,
    E: tl.constexpr, K: tl.constexpr, RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Route ROWS tokens per program; grid [T / ROWS]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    column = tl.arange(0, COLUMNS)
    inside = (row < num_tokens)[:, None] & (expert < E)[None, :]
    # [ROWS, EXPERTS] tile of logits
    logits = tl.load(logits_ptr + row[:, None] * E + expert[None, :], mask=inside, other=0.0)
    # Rows past the last token keep their experts: their keys must stay distinct, or ids would repeat.
    weights, ids = select_experts(logits, (expert < E)[None, :], K, COLUMNS, RENORMALIZE)
    place = row[:, None] * K + column[None, :]
    written = (row < num_tokens)[:, None] & (column < K)[None, :]
    tl.store(weights_ptr + place, weights, mask=written)
    tl.store(ids_ptr + place, ids, mask=written)


@triton.jit(do_not_specialize=["num_tokens", "max_blocks"])
def route_order_kernel(
    logits_ptr, weights_ptr, ids_ptr,  # [T, E], [T, K], [T, K]
    slots_ptr, expert_offsets_ptr, block_expert_ptr, block_row_ptr, block_end_ptr, num_blocks_ptr,
    num_tokens, max_blocks,
    E: tl.constexpr, K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Route all tokens and order their slots in one program; SLOTS = ROWS * COLUMNS, compared pair by pair."""
    row = tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    column = tl.arange(0, COLUMNS)
    inside = (row < num_tokens)[:, None] & (expert < E)[None, :]
    # [ROWS, EXPERTS] tile of logits
    logits = tl.load(logits_ptr + row[:, None] * E + expert[None, :], mask=inside, other=0.0)
    weights, ids = select_experts(logits, (expert < E)[None, :], K, COLUMNS, RENORMALIZE)
    place = row[:, None] * K + column[None, :]
    written = (row < num_tokens)[:, None] & (column < K)[None, :]
    tl.store(weights_ptr + place, weights, mask=written)
    tl.store(ids_ptr + place, ids, mask=written)

    # Slots that do not exist belong to expert EXPERTS, which no slot of the layer has.
    owner = tl.reshape(tl.where(written, ids, EXPERTS), [SLOTS])
    slot = tl.reshape(place, [SLOTS])
    real = owner < EXPERTS
    # Counted by comparing: tl.histogram counts a value once per register that repeats it (Triton 3.6), and the layout
    # that reshape leaves here may repeat values: for 16 tokens of 64 experts it does, and the counts were wrong.
    counts = tl.sum((owner[:, None] == expert[None, :]).to(tl.int32), axis=0)
    offsets = tl.cumsum(counts, 0) - counts
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first_block = tl.cumsum(blocks, 0) - blocks
    tl.store(expert_offsets_ptr + expert, offsets, mask=expert < E)
    tl.store(expert_offsets_ptr + E, num_tokens * K)
    owner_or_first = tl.where(real, owner, 0)
    earlier = (owner[:, None] == owner[None, :]) & (slot[None, :] < slot[:, None])
    rank = tl.sum(earlier.to(tl.int32), axis=1)  # slots of my expert before me
    offset = tl.gather(offsets, owner_or_first, 0)
    tl.store(slots_ptr + offset + rank, slot, mask=real)
    # Each slot whose rank is a multiple of BLOCK_M opens a block and writes its row of the table.
    opens = real & (rank % BLOCK_M == 0)
    block = tl.gather(first_block, owner_or_first, 0) + rank // BLOCK_M
    tl.store(block_expert_ptr + block, owner, mask=opens)
    tl.store(block_row_ptr + block, offset + rank, mask=opens)
    tl.store(
        block_end_ptr + block, offset + tl.minimum(rank + BLOCK_M, tl.gather(counts, owner_or_first, 0)), mask=opens
    )
    total = tl.sum(blocks, axis=0)
    tl.store(num_blocks_ptr, total)
    unused = tl.arange(0, SLOTS)  # the bound on blocks is at most the number of slots
    absent = (unused >= total) & (unused < max_blocks)
    tl.store(block_expert_ptr + unused, -1, mask=absent)
    tl.store(block_row_ptr + unused, 0, mask=absent)
    tl.store(block_end_ptr + unused, 0, mask=absent)
