"""The references, on a CPU."""

from __future__ import annotations

import torch

from moetune_kernels.fused_moe import fused_moe_reference


def test_no_tokens_make_no_output():
    ids = torch.empty((0, 2), dtype=torch.int64)
    x, w13, w2 = torch.empty(0, 96), torch.ones(8, 160, 96), torch.ones(8, 96, 80)
    assert fused_moe_reference(x, w13, w2, torch.empty(0, 2), ids).shape == (0, 96)
