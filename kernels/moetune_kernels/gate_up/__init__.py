"""Gate-up: the first grouped GEMM, SwiGLU in its epilogue."""

from moetune_kernels.gate_up.launch import gate_up
from moetune_kernels.gate_up.reference import gate_up_reference

__all__ = ["gate_up", "gate_up_reference"]
