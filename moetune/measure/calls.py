"""The runtime's kernel calls on meta tensors: what the compile pool compiles, the same binaries that a layer launches."""

from __future__ import annotations

import torch

from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.down.launch import DownOperands, down_calls
from moetune_kernels.gate_up.launch import gate_up_calls
from moetune_kernels.kernel_call import KernelCall
from moetune_kernels.permute.order import SlotOrder
from moetune_kernels.shape import MoEShape, WeightFormat

COMPILE_TOKENS = 64  # any count: kernels are not specialised on it
DTYPES = {WeightFormat.BF16: torch.bfloat16, WeightFormat.FP16: torch.float16}


def gemm_calls(role: Role, config: MoEKernelConfig, shape: MoEShape) -> tuple[KernelCall, ...]:
    """Return the calls of one grouped GEMM on meta tensors; the GEMM is the last."""
    slots, dtype = COMPILE_TOKENS * shape.top_k, DTYPES[shape.format]
    order = SlotOrder.empty(slots, shape.local_experts, config.block_m, "meta")
    h = torch.empty((slots, shape.inter), dtype=dtype, device="meta")
    if role is Role.GATE_UP:
        x = torch.empty((COMPILE_TOKENS, shape.hidden), dtype=dtype, device="meta")
        w13 = torch.empty((shape.local_experts, 2 * shape.inter, shape.hidden), dtype=dtype, device="meta")
        return gate_up_calls(x, w13, order, h, config)
    w2 = torch.empty((shape.local_experts, shape.hidden, shape.inter), dtype=dtype, device="meta")
    weights = torch.empty((COMPILE_TOKENS, shape.top_k), dtype=torch.float32, device="meta")
    y = torch.empty((slots, shape.hidden), dtype=dtype, device="meta")
    return down_calls(DownOperands(h, w2, weights, y), order, config)
