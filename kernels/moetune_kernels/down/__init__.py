"""Down: the second grouped GEMM, times the router weight."""

from moetune_kernels.down.launch import DownOperands, down
from moetune_kernels.down.reference import down_reference

__all__ = ["DownOperands", "down", "down_reference"]
