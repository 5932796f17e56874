"""Fused Mixture-of-Experts kernels and the tuned tables that choose between them.

Dimension letters in every docstring: T tokens, K experts per token, S = T * K slots, E local experts, H hidden size,
I intermediate size per rank. Names load on first use, so that reading a config or a table never loads torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from moetune_kernels.config import MoEKernelConfig, Role, Structure
    from moetune_kernels.device import DeviceInfo, device_info
    from moetune_kernels.errors import MoetuneError
    from moetune_kernels.fused_moe import FusedMoE, fused_moe, fused_moe_forward
    from moetune_kernels.lookup import Resolved, best_plan, reload
    from moetune_kernels.permute import permute
    from moetune_kernels.plan import LayerPlan
    from moetune_kernels.route import route
    from moetune_kernels.shape import MoEShape, WeightFormat
    from moetune_kernels.table import Entry, TunedTable

_HOME = {
    "DeviceInfo": "device",
    "Entry": "table",
    "FusedMoE": "fused_moe",
    "LayerPlan": "plan",
    "MoEKernelConfig": "config",
    "MoEShape": "shape",
    "MoetuneError": "errors",
    "Resolved": "lookup",
    "Role": "config",
    "Structure": "config",
    "TunedTable": "table",
    "WeightFormat": "shape",
    "best_plan": "lookup",
    "device_info": "device",
    "fused_moe": "fused_moe",
    "fused_moe_forward": "fused_moe",
    "permute": "permute",
    "reload": "lookup",
    "route": "route",
}

__all__ = [
    "DeviceInfo",
    "Entry",
    "FusedMoE",
    "LayerPlan",
    "MoEKernelConfig",
    "MoEShape",
    "MoetuneError",
    "Resolved",
    "Role",
    "Structure",
    "TunedTable",
    "WeightFormat",
    "best_plan",
    "device_info",
    "fused_moe",
    "fused_moe_forward",
    "permute",
    "reload",
    "route",
]


class _Runtime(ModuleType):
    """This module, with one rule: the folder of an op never hides the function of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            return  # importing moetune_kernels.fused_moe.layer must not turn moetune_kernels.fused_moe into a module
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Runtime


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
