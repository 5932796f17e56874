"""Counts where the host would wait for a GPU, on a CPU too: a test of speed that needs none."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

# What copies a value to the host, or sizes its result by values; bincount reads the least and the largest first.
ONE_WAIT = (
    *("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "equal"),
    *("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select"),
)
WAITS: dict[str, int] = {**dict.fromkeys(ONE_WAIT, 1), "bincount": 2}


class HostWaits(TorchFunctionMode):
    """Within ``with HostWaits() as waits:``, ``waits.count`` grows by what the calling thread would wait.

    Copies from the host to the GPU are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        self.count += WAITS.get(name, 0)
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.count += sum(isinstance(one, torch.Tensor) and one.dtype is torch.bool for one in index)
        return func(*args, **(kwargs or {}))
