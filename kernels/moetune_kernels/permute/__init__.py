"""Permute: slots sorted by expert and cut into row blocks, on the device."""

from moetune_kernels.permute.launch import permute
from moetune_kernels.permute.order import SlotOrder
from moetune_kernels.permute.reference import permute_reference

__all__ = ["SlotOrder", "permute", "permute_reference"]
