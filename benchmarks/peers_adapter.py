"""moetune's layer as an entry of the peers harness: ``peers.py --ours benchmarks/peers_adapter.py``.

The harness times router logits in, weighted expert outputs out. The plan is the one that production would load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moetune_kernels.fused_moe.layer import Weights, moe_from_logits


def build(case: Any) -> Callable[[], torch.Tensor] | None:
    """Return the layer for one case of the harness, or None for a format that has no kernel yet."""
    if case.format != "bf16":
        return None
    weights = Weights(case.weights["w13"], case.weights["w2"])

    def run() -> torch.Tensor:
        return moe_from_logits(case.x, weights, case.logits, (case.top_k, True))

    return run
