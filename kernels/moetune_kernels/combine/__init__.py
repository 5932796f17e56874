"""Combine: the sum over a token's experts."""

from moetune_kernels.combine.launch import combine
from moetune_kernels.combine.reference import combine_reference

__all__ = ["combine", "combine_reference"]
