"""Every structure on the GPU against float32: dtypes, hostile routings, odd sizes, many experts."""

from __future__ import annotations

import pytest
import torch

from moetune_kernels import LayerPlan, MoEKernelConfig, Structure, fused_moe, fused_moe_forward, permute, route
from moetune_kernels.fused_moe import fused_moe_reference
from moetune_kernels.fused_moe.routing import routing_calls
from moetune_kernels.kernel_call import launch_all
from moetune_kernels.match import match
from moetune_kernels.permute import SlotOrder, permute_reference
from moetune_kernels.route import route_reference
from moetune_kernels.shape import WeightFormat

FORMATS = {torch.bfloat16: WeightFormat.BF16, torch.float16: WeightFormat.FP16}


def tensors(tokens, experts, top_k, hidden, inter, dtype=torch.bfloat16, seed=0):
    gen = torch.Generator("cuda").manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, device="cuda", generator=gen)

    w13 = (draw(experts, 2 * inter, hidden) / hidden**0.5).to(dtype)
    w2 = (draw(experts, hidden, inter) / inter**0.5).to(dtype)
    weights, ids = route_reference(draw(tokens, experts), top_k)
    return draw(tokens, hidden).to(dtype), w13, w2, weights, ids


def check(got, args):
    reason = match(got, fused_moe_reference(*args), FORMATS[got.dtype])
    assert reason is None, reason


def config(structure, block_m, block_n, block_k, warps, group_m=1):
    return MoEKernelConfig(
        structure=structure, block_m=block_m, block_n=block_n, block_k=block_k, num_warps=warps, group_m=group_m
    )


G, T, P = Structure.GATHER, Structure.TMA, Structure.TMA_PERMUTE
PLANS = {
    "gather-16": (config(G, 16, 64, 64, 4), config(G, 16, 64, 64, 4)),
    "gather-32-tma-down": (config(G, 32, 64, 64, 4), config(T, 32, 64, 64, 4)),
    "gather-64": (config(G, 64, 64, 64, 4, 8), config(G, 64, 128, 64, 4, 8)),
    "gather-128": (config(G, 128, 128, 64, 8, 8), config(G, 128, 256, 64, 8, 8)),
    "tma-16": (config(T, 16, 64, 64, 4), config(T, 16, 64, 64, 4)),
    "tma-64": (config(T, 64, 128, 64, 8, 8), config(T, 64, 128, 64, 4, 8)),
    "tma-128": (config(T, 128, 128, 64, 8, 8), config(T, 128, 256, 64, 8, 8)),
    "tma-permute-64": (config(P, 64, 64, 64, 4, 8), config(T, 64, 256, 64, 8, 1)),
    "tma-permute-128": (config(P, 128, 128, 64, 8, 8), config(T, 128, 128, 64, 4, 8)),
}


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_every_structure_matches_float32(plan, dtype):
    if torch.cuda.get_device_capability() < (9, 0) and "tma" in plan:
        pytest.skip("descriptors need compute capability 9.0")
    gate_up, down = PLANS[plan]
    for tokens in (1, 3, 97, 700):
        args = tensors(tokens, 8, 2, 512, 384, dtype, seed=tokens)
        check(fused_moe(*args, plan=LayerPlan(gate_up=gate_up, down=down)), args)


@pytest.mark.parametrize("plan", PLANS)
def test_hostile_routings_match_on_every_structure(plan):
    if torch.cuda.get_device_capability() < (9, 0) and "tma" in plan:
        pytest.skip("descriptors need compute capability 9.0")
    gate_up, down = PLANS[plan]
    x, w13, w2, weights, ids = tensors(150, 8, 2, 512, 384)
    hostile = {
        "all-to-one": torch.full_like(ids, 5),
        "first-and-last": torch.tensor([0, 7], device="cuda", dtype=torch.int32).repeat(150, 1),
        "nobody": torch.full_like(ids, -1),
        "holes": ids.where(torch.rand(ids.shape, device="cuda") < 0.7, torch.full_like(ids, 2_000_000_000)),
    }
    for name, routing in hostile.items():
        got = fused_moe(x, w13, w2, weights, routing, plan=LayerPlan(gate_up=gate_up, down=down))
        want = fused_moe_reference(x, w13, w2, weights, routing)
        assert match(got, want, WeightFormat.BF16) is None, name


@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "inter"),
    [(5, 2, 97, 47), (60, 4, 2880, 2880), (384, 6, 3584, 352), (1024, 8, 512, 64), (3, 3, 2880, 1408), (16, 4, 64, 16)],
    ids=["odd", "gpt-oss-like", "384-experts", "1024-experts", "every-expert", "tiny"],
)
def test_sizes_that_are_no_powers_of_two_match(experts, top_k, hidden, inter):
    for tokens in (1, 3, 97):
        args = tensors(tokens, experts, top_k, hidden, inter)
        check(fused_moe(*args), args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 128, 8), (8, 128, 8), (300, 60, 4), (1000, 384, 6), (77, 1024, 16), (9000, 8, 2)],
)
def test_the_router_and_its_order_match_exactly(tokens, experts, top_k, dtype):
    logits = torch.randn(tokens, experts, device="cuda").to(dtype)  # bf16 logits tie often
    weights, ids = route(logits, top_k)
    want_weights, want_ids = route_reference(logits, top_k)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=1e-4, atol=1e-6)
    for block_m in (16, 128):
        got, want = permute(ids, experts, block_m), permute_reference(ids, experts, block_m)
        for name in ("slots", "expert_offsets", "block_expert", "block_row", "block_end", "num_blocks"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("experts", [2, 5, 8, 16, 60, 64, 128, 256, 512, 1024])
def test_the_order_written_by_the_router_is_right_at_every_size(experts):
    """Triton lays tensors out anew for each size; one such layout repeats values, and tl.histogram counts each."""
    for top_k in (1, 2, 6, 10):
        for tokens in {1, 64 // top_k} if top_k <= experts else ():
            logits = torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16)
            weights = torch.empty(tokens, top_k, device="cuda")
            ids = torch.empty(tokens, top_k, device="cuda", dtype=torch.int32)
            got = SlotOrder.empty(tokens * top_k, experts, 16, "cuda")
            launch_all(routing_calls(logits, (weights, ids), experts, got, renormalize=True))
            _, want_ids = route_reference(logits, top_k)
            assert torch.equal(ids, want_ids), (tokens, top_k)
            want = permute_reference(want_ids, experts, 16)
            for name in ("slots", "expert_offsets", "block_expert", "block_row", "block_end", "num_blocks"):
                assert torch.equal(getattr(got, name), getattr(want, name)), (name, tokens, top_k)


@pytest.mark.parametrize("tokens", [1, 4, 8, 9, 200])
def test_logits_to_output_matches_route_then_layer(tokens):
    x, w13, w2, _, _ = tensors(tokens, 128, 8, 512, 128)
    gate = torch.randn(128, 512, device="cuda").bfloat16() / 16
    weights, ids = route_reference(torch.nn.functional.linear(x, gate), 8)
    check(fused_moe_forward(x, gate, (w13, w2), top_k=8), (x, w13, w2, weights, ids))


def test_one_process_serves_two_dtypes_and_two_shapes():
    for dtype, hidden in ((torch.bfloat16, 256), (torch.float16, 256), (torch.bfloat16, 512), (torch.bfloat16, 256)):
        args = tensors(64, 8, 2, hidden, 128, dtype)
        check(fused_moe(*args), args)


def test_zero_tokens_launch_nothing_and_leave_no_error():
    x, w13, w2, weights, ids = tensors(5, 8, 2, 256, 128)
    assert fused_moe(x[:0], w13, w2, weights[:0], ids[:0]).shape == (0, 256)
    check(fused_moe(x, w13, w2, weights, ids), (x, w13, w2, weights, ids))
    torch.cuda.synchronize()


def test_dirty_memory_and_empty_experts_leak_nothing():
    x, w13, w2, weights, _ = tensors(6, 8, 2, 256, 128)
    ids = torch.tensor([[0, 7]] * 6, device="cuda", dtype=torch.int32)
    dirty = torch.full((1 << 28,), float("nan"), device="cuda")
    del dirty
    runs = [fused_moe(x, w13, w2, weights, ids) for _ in range(3)]
    check(runs[0], (x, w13, w2, weights, ids))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("plan", PLANS)
def test_twenty_runs_are_bitwise_equal(plan):
    if torch.cuda.get_device_capability() < (9, 0) and "tma" in plan:
        pytest.skip("descriptors need compute capability 9.0")
    gate_up, down = PLANS[plan]
    x, w13, w2, _, _ = tensors(333, 16, 4, 512, 384)
    gate = torch.randn(16, 512, device="cuda").bfloat16() / 16
    chosen = LayerPlan(gate_up=gate_up, down=down)
    first = fused_moe_forward(x, gate, (w13, w2), top_k=4, plan=chosen)
    for _ in range(19):
        assert torch.equal(fused_moe_forward(x, gate, (w13, w2), top_k=4, plan=chosen), first)
