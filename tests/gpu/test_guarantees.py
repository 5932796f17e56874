"""What a server relies on, on a real GPU: captures without warm-up, the right device, stepping down, flat memory."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moetune_kernels import LayerPlan, MoEKernelConfig, Structure, fused_moe, fused_moe_forward, permute, route
from moetune_kernels.errors import ShapeError, UnsupportedConfigError
from moetune_kernels.fused_moe import fused_moe_reference, layer
from moetune_kernels.lookup import Resolved
from moetune_kernels.match import match
from moetune_kernels.permute import permute_reference
from moetune_kernels.route import route_reference
from moetune_kernels.shape import WeightFormat

ROOT = Path(__file__).resolve().parents[2]
CASE = Path(__file__).with_name("capture_case.py")
HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="descriptors need compute capability 9.0",
)
# Five stages of 128 rows and twice 128 columns, 128 deep: 491,520 B of shared memory, more than any GPU has.
TOO_BIG = MoEKernelConfig(
    structure=Structure.GATHER, block_m=128, block_n=128, block_k=128, num_warps=8, prefetch_distance=5
)
TOO_BIG_PLAN = LayerPlan(gate_up=TOO_BIG, down=TOO_BIG)


def tensors(tokens, experts, top_k, hidden, inter, device="cuda"):
    gen = torch.Generator(device).manual_seed(tokens)

    def draw(*size):
        return torch.randn(*size, device=device, generator=gen, dtype=torch.bfloat16)

    weights, ids = route_reference(draw(tokens, experts), top_k)
    w13, w2 = draw(experts, 2 * inter, hidden).div_(hidden**0.5), draw(experts, hidden, inter).div_(inter**0.5)
    return draw(tokens, hidden), w13, w2, weights, ids


def check(got, args):
    reason = match(got, fused_moe_reference(*args), WeightFormat.BF16)
    assert reason is None, reason


@pytest.mark.timeout(400)
def test_counts_that_were_never_warmed_up_are_captured_from_an_empty_cache(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(CASE)], env=environment, capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "captured and replayed" in done.stdout


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("tokens", [5, 300, 2000], ids=["decode", "route-then-permute", "permute-in-three"])
def test_tensors_on_a_device_that_is_not_current_are_served_there(tokens):
    x, w13, w2, weights, ids = tensors(tokens, 8, 4, 512, 256, "cuda:1")
    gate = torch.randn(8, 512, device="cuda:1", dtype=torch.bfloat16) / 16
    with torch.cuda.device(0):
        got = fused_moe(x, w13, w2, weights, ids)
        whole = fused_moe_forward(x, gate, (w13, w2), 4)
        routed_weights, routed_ids = route(torch.nn.functional.linear(x, gate), 4)
        order = permute(ids, 8, 64)
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    assert got.device == whole.device == routed_ids.device == order.slots.device == torch.device("cuda:1")
    check(got, (x, w13, w2, weights, ids))
    check(whole, (x, w13, w2, routed_weights, routed_ids))
    assert torch.equal(order.slots, permute_reference(ids, 8, 64).slots)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_two_gpus_are_refused_by_name():
    x, w13, w2, weights, ids = tensors(5, 8, 2, 512, 256)
    with pytest.raises(ShapeError, match="w2 is on cuda:1, x on cuda:0"):
        fused_moe(x, w13, w2.to("cuda:1"), weights, ids)


def test_a_tuned_plan_that_the_gpu_refuses_is_replaced_by_the_default_with_one_warning(monkeypatch, caplog):
    args = tensors(300, 8, 2, 512, 256)
    monkeypatch.setattr(layer, "best_plan", lambda *_: Resolved(TOO_BIG_PLAN, "table", "here.json", 300, "a table"))
    monkeypatch.setattr(layer, "_refused", set())
    with caplog.at_level(logging.WARNING, logger="moetune"):
        runs = [fused_moe(*args) for _ in range(2)]
    check(runs[0], args)
    assert torch.equal(runs[0], runs[1])
    warned = [record.getMessage() for record in caplog.records if "refuses" in record.getMessage()]
    assert len(warned) == 1
    assert "Required" in warned[0]
    assert "Hardware limit" in warned[0]


def test_a_plan_that_needs_too_much_shared_memory_never_reaches_triton():
    with pytest.raises(UnsupportedConfigError, match=r"needs [0-9,]+ B of shared memory, the limit is [0-9,]+ B"):
        fused_moe(*tensors(300, 8, 2, 512, 256), plan=TOO_BIG_PLAN)


def test_one_process_serves_other_widths_and_top_k_and_refuses_float32():
    for hidden, top_k in ((2048, 2), (7168, 2), (2048, 8), (2048, 2)):
        args = tensors(64, 64, top_k, hidden, 512)
        check(fused_moe(*args), args)
    x, *rest = tensors(64, 8, 2, 512, 256)
    with pytest.raises(ShapeError, match="bfloat16 or both float16"):
        fused_moe(x.float(), *rest)


def prefill(gate_up: Structure, down: Structure) -> LayerPlan:
    config = MoEKernelConfig(structure=gate_up, block_m=128, block_n=128, block_k=64, num_warps=8, group_m=8)
    return LayerPlan(gate_up=config, down=replace(config, structure=down))


PREFILL = {
    "gather": prefill(Structure.GATHER, Structure.GATHER),
    "tma": prefill(Structure.TMA, Structure.TMA),
    "tma-permute": prefill(Structure.TMA_PERMUTE, Structure.TMA),
}


@HOPPER
@pytest.mark.parametrize("tokens", [37_449, 37_450])
@pytest.mark.parametrize("plan", PREFILL)
def test_every_structure_reaches_rows_past_two_billion_elements(plan, tokens):
    x, w13, w2, weights, ids = tensors(tokens, 8, 8, 7168, 256)  # S x H is 2^31 between the two counts
    got = fused_moe(x, w13, w2, weights, ids, plan=PREFILL[plan])[-64:]
    check(got, (x[-64:], w13, w2, weights[-64:], ids[-64:]))


@HOPPER
@pytest.mark.parametrize("plan", PREFILL)
def test_every_structure_reaches_the_last_of_many_big_experts(plan):
    x, w13, w2, _, _ = tensors(200, 129, 1, 4096, 2048)
    ids, ones = torch.full((200, 1), 128, device="cuda", dtype=torch.int32), torch.ones(200, 1, device="cuda")
    got = fused_moe(x, w13, w2, ones, ids, plan=PREFILL[plan])
    check(got, (x, w13[128:], w2[128:], ones, torch.zeros_like(ids)))


@pytest.mark.plain_memory
def test_serving_many_counts_leaves_memory_flat():
    args = tensors(4096, 16, 4, 512, 256)
    counts = [1, 7, 64, 65, 500, 2048, 4096]

    def serve(tokens):
        x, w13, w2, weights, ids = args
        fused_moe(x[:tokens], w13, w2, weights[:tokens], ids[:tokens])

    for tokens in counts:
        serve(tokens)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(20):
        for tokens in counts:
            serve(tokens)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() <= reserved + (64 << 20)


def test_weights_off_the_16_byte_grid_are_refused_and_the_next_call_is_right():
    x, w13, w2, weights, ids = tensors(300, 8, 2, 512, 256)
    memory = torch.zeros(w13.numel() + 1, device="cuda", dtype=torch.bfloat16)
    memory[1:] = w13.flatten()
    with pytest.raises(ShapeError, match="w13 must start on a multiple of 16 bytes"):
        fused_moe(x, memory[1:].view(w13.shape), w2, weights, ids)
    check(fused_moe(x, w13, w2, weights, ids), (x, w13, w2, weights, ids))
