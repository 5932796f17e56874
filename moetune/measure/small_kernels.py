"""The kernels beside both GEMMs (route, permute, combine): which binaries a sweep launches, one compile job for each.

A binary depends on a few sizes only: route and permute in one launch on the token count's next power of two and on
``block_m``, permute on ``block_m`` and on whether there are many slots, route on whether there are many tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from moetune.measure.calls import DTYPES
from moetune.measure.compile_job import KernelJob
from moetune.measure.kernel_jobs import small_call
from moetune.measure.odd import LAYER_TOKENS
from moetune.models.roofline import total_experts
from moetune.space import sensible_block_ms
from moetune_kernels.combine.launch import combine_calls
from moetune_kernels.device import DeviceInfo
from moetune_kernels.fused_moe.routing import routing_calls
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.kernel_call import KernelCall
from moetune_kernels.permute.launch import permute_calls
from moetune_kernels.permute.order import SlotOrder
from moetune_kernels.shape import MAX_TOKENS, MoEShape

ANY_COUNTS = tuple(1 << power for power in range(MAX_TOKENS.bit_length()))  # of a sweep whose counts nobody told
ODD_TOKENS = (1, LAYER_TOKENS)  # of the odd layers, which every plan meets; the odd problems' slots are permuted alike
NEIGHBOUR_REACH = 8  # times a token count, up to which another one's winner is raced there, with its block_m


def small_jobs(shape: MoEShape, device: DeviceInfo, tokens: Sequence[int] = ()) -> list[tuple[int, KernelJob]]:
    """Return every binary once, with the token count that needs it first.

    Args:
        shape: the layer.
        device: what to compile for.
        tokens: the sweep's counts in the order of their turns; any that a layer may have when empty.
    """
    found: dict[object, tuple[int, KernelJob]] = {}
    for count, asked, block_m in _launched(shape, device, tokens or ANY_COUNTS):
        for place, call in enumerate(small_calls(asked, block_m, shape)):
            job = KernelJob(
                build=small_call,
                args=(asked, block_m, shape, place),
                device=device,
                smem_ceiling=device.smem_limit,
            )
            found.setdefault(_variant(call), (count, job))
    return list(found.values())


def _launched(shape: MoEShape, device: DeviceInfo, tokens: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield every count with the token counts and the ``block_m`` that layers and kernels are launched at there."""
    for count in tokens:
        near = [other for other in tokens if max(count, other) <= NEIGHBOUR_REACH * min(count, other)]
        heights = dict.fromkeys(
            block_m
            for other in (count, *near)  # its own first
            for block_m in (*sensible_block_ms(shape, other), heuristic_plan(shape, other, device).block_m)
        )
        yield from ((count, asked, block_m) for block_m in heights for asked in (count, *ODD_TOKENS))


def small_calls(tokens: int, block_m: int, shape: MoEShape) -> tuple[KernelCall, ...]:
    """Return the calls of everything but the two GEMMs on meta tensors: a layer's, and permute alone, for a GEMM alone."""
    dtype = DTYPES[shape.format]
    logits = torch.empty((tokens, total_experts(shape)), dtype=dtype, device="meta")
    weights = torch.empty((tokens, shape.top_k), dtype=torch.float32, device="meta")
    ids = torch.empty((tokens, shape.top_k), dtype=torch.int32, device="meta")
    y = torch.empty((tokens * shape.top_k, shape.hidden), dtype=dtype, device="meta")
    out = torch.empty((tokens, shape.hidden), dtype=dtype, device="meta")
    order = SlotOrder.empty(tokens * shape.top_k, shape.local_experts, block_m, "meta")
    routing = routing_calls(logits, (weights, ids), shape.local_experts, order, renormalize=True)
    alone = permute_calls(ids, shape.local_experts, order)
    return (*routing, *alone, *combine_calls(y, ids, shape.local_experts, out))


def _variant(call: KernelCall) -> object:
    """Return what tells one binary of a layer's small kernels from another: all their run-time numbers are unspecialised."""
    constants = [
        argument for parameter, argument in zip(call.kernel.params, call.args, strict=True) if parameter.is_constexpr
    ]
    return (call.kernel, *constants, *sorted(call.options.items()))
