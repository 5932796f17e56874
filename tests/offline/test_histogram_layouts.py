"""No kernel counts with ``tl.histogram`` over a layout that repeats values in registers: Triton 3.6 counts each copy."""

from __future__ import annotations

import re

import pytest
import torch

from moetune.measure.compile_job import pretend_device
from moetune_kernels.device import TARGETS
from moetune_kernels.fused_moe.routing import routing_calls
from moetune_kernels.permute import SlotOrder

REPEATS = re.compile(
    r"register = \[(?:\[[\d, ]+\], )*\[0(?:, 0)*\]"
)  # a register basis of zero: the same value once more


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 8, 2), (16, 64, 2), (8, 128, 8), (100, 60, 4), (900, 1024, 8), (5000, 128, 8)]
)
def test_histograms_count_every_slot_once(tokens, experts, top_k):
    logits = torch.empty((tokens, experts), dtype=torch.bfloat16, device="meta")
    topk = (
        torch.empty((tokens, top_k), dtype=torch.float32, device="meta"),
        torch.empty((tokens, top_k), dtype=torch.int32, device="meta"),
    )
    order = SlotOrder.empty(tokens * top_k, experts, 16, "meta")
    pretend_device(TARGETS["sm_90"])
    for call in routing_calls(logits, topk, experts, order, renormalize=True):
        text = call.warmup().asm["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
        for name in re.findall(r"tt\.histogram .*?: tensor<\w+, (#\w+)>", text):
            assert not REPEATS.search(layouts[name]), (call.kernel.fn.__name__, layouts[name])


def test_the_check_knows_a_layout_that_repeats_values():
    repeated = (
        "#ttg.linear<{register = [[1], [0], [0]], lane = [[0], [0], [0], [2], [4]], warp = [[8], [16]], block = []}>"
    )
    assert REPEATS.search(repeated)
    assert not REPEATS.search(repeated.replace("[[1], [0], [0]]", "[[1]]"))
