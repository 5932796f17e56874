"""Route: softmax top-k from router logits to expert ids and weights."""

from moetune_kernels.route.launch import route
from moetune_kernels.route.reference import route_reference

__all__ = ["route", "route_reference"]
