"""Where a layer's time goes: one page per layer and device, measured where there is a GPU, analytical elsewhere."""

from moetune.profiling.page import LayerProfile
from moetune.profiling.request import PlanChoice, ProfileRequest
from moetune.profiling.run import profile
from moetune.profiling.terminal import render
from moetune.profiling.twin import profile_moe_kernel

__all__ = ["LayerProfile", "PlanChoice", "ProfileRequest", "profile", "profile_moe_kernel", "render"]
