"""One small case per kernel, to be run under compute-sanitizer; ``--plant`` adds a store past the end of a tensor.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python3 tests/gpu/sanitizer_case.py
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

from moetune_kernels.combine import combine
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.down import down
from moetune_kernels.gate_up import gate_up
from moetune_kernels.permute import SlotOrder, launch, permute
from moetune_kernels.route import route
from moetune_kernels.route.launch import route_order_calls


@triton.jit
def store_past_the_end_kernel(out_ptr, size):
    """Write one block more than ``size`` elements."""
    offset = tl.arange(0, 1024)
    tl.store(out_ptr + size + offset, 1.0)


def routing() -> tuple[torch.Tensor, torch.Tensor]:
    """Run the router with and without its order, and permute in one and in three launches."""
    logits = torch.randn(37, 6, device="cuda")
    weights, ids = route(logits, 3)
    few = SlotOrder.empty(33, 6, 16, "cuda")
    parts = torch.empty((11, 3), device="cuda"), torch.empty((11, 3), dtype=torch.int32, device="cuda")
    route_order_calls(logits[:11].contiguous(), *parts, True, few)[0].launch()
    ids[3, 1], ids[4, 0] = -1, 2_000_000_000
    permute(ids, 6, 16)
    launch.ONE_LAUNCH_SLOTS = 64
    permute(ids, 6, 16)
    return weights, ids


def main() -> None:
    """Run every kernel once on 37 tokens, H=160, I=96, six experts."""
    weights, ids = routing()
    x = torch.randn(37, 160, device="cuda", dtype=torch.bfloat16)
    w13 = torch.randn(6, 192, 160, device="cuda", dtype=torch.bfloat16)
    w2 = torch.randn(6, 160, 96, device="cuda", dtype=torch.bfloat16)
    h, y = None, None
    for structure in Structure:
        for block_m in (16, 64):
            config = MoEKernelConfig(structure=structure, block_m=block_m, block_n=64, block_k=32, group_m=4)
            order = permute(ids, 6, block_m)
            h = gate_up(x, w13, order, config)
            if structure is not Structure.TMA_PERMUTE:
                y = down(h, w2, order, weights, config)
    combine(y, ids, 6)
    if "--plant" in sys.argv:
        store_past_the_end_kernel[(1,)](torch.empty(1000, device="cuda"), 1000)
    torch.cuda.synchronize()
    names = [structure.value for structure in Structure] + [role.value for role in Role]
    sys.stdout.write(f"every kernel ran: {names}\n")


if __name__ == "__main__":
    main()
