"""The fused layer: route, permute, gate-up, down, combine."""

from moetune_kernels.fused_moe.launch import FusedMoE, fused_moe, fused_moe_forward
from moetune_kernels.fused_moe.reference import fused_moe_reference

__all__ = ["FusedMoE", "fused_moe", "fused_moe_forward", "fused_moe_reference"]
