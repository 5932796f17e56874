"""How the layer behaves in a server: CUDA graphs, torch.compile, very many tokens, big weights."""

from __future__ import annotations

import pytest
import torch

from moetune_kernels import FusedMoE, fused_moe, fused_moe_forward
from moetune_kernels.combine import combine
from moetune_kernels.fused_moe import fused_moe_reference
from moetune_kernels.match import match
from moetune_kernels.route import route_reference
from moetune_kernels.shape import WeightFormat


def weights_of(experts, hidden, inter):
    w13 = torch.randn(experts, 2 * inter, hidden, device="cuda", dtype=torch.bfloat16).div_(hidden**0.5)
    return w13, torch.randn(experts, hidden, inter, device="cuda", dtype=torch.bfloat16).div_(inter**0.5)


def test_a_captured_layer_replays_new_data_and_equals_eager():
    w13, w2 = weights_of(16, 512, 256)
    gate = torch.randn(16, 512, device="cuda", dtype=torch.bfloat16)
    fused_moe_forward(torch.randn(8, 512, device="cuda", dtype=torch.bfloat16), gate, (w13, w2), 4)
    for tokens in (24, 7):
        x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
        fused_moe_forward(x, gate, (w13, w2), 4)  # loaded before; without that: test_guarantees.py
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fused_moe_forward(x, gate, (w13, w2), 4)
        for seed in range(3):
            x.copy_(torch.randn(tokens, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)))
            graph.replay()
            assert torch.equal(out, fused_moe_forward(x, gate, (w13, w2), 4))


def test_the_layer_compiles_into_one_graph():
    layer = FusedMoE(256, 128, 8, device="cuda")
    compiled = torch.compile(lambda x: layer(x) + 1.0, fullgraph=True)
    x = torch.randn(33, 256, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(compiled(x), layer(x) + 1.0, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tokens", [37_449, 37_450])
def test_offsets_past_two_billion_elements_reach_the_last_rows(tokens):
    experts, hidden, inter, top_k = 8, 7168, 256, 8
    w13, w2 = weights_of(experts, hidden, inter)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weights, ids = route_reference(torch.randn(tokens, experts, device="cuda"), top_k)
    got = fused_moe(x, w13, w2, weights, ids)[-64:]
    want = fused_moe_reference(x[-64:], w13, w2, weights[-64:], ids[-64:])
    assert match(got, want, WeightFormat.BF16) is None


@pytest.mark.parametrize("tokens", [131_071, 131_072])
def test_the_sum_over_experts_reads_past_two_billion_elements(tokens):
    y = torch.empty((tokens * 8, 2048), device="cuda", dtype=torch.bfloat16).fill_(1.0)
    y[-8:] = 3.0
    ids = torch.zeros((tokens, 8), device="cuda", dtype=torch.int32)
    out = combine(y, ids, 1)
    assert (out[-1] == 24.0).all()
    assert (out[:-1] == 8.0).all()


def test_all_tokens_to_the_last_of_many_big_experts():
    experts, hidden, inter = 129, 4096, 2048
    w13, w2 = weights_of(experts, hidden, inter)
    x = torch.randn(200, hidden, device="cuda", dtype=torch.bfloat16)
    ids = torch.full((200, 1), 128, device="cuda", dtype=torch.int32)
    ones = torch.ones(200, 1, device="cuda")
    got = fused_moe(x, w13, w2, ones, ids)
    want = fused_moe_reference(x, w13[128:], w2[128:], ones, torch.zeros_like(ids))
    assert match(got, want, WeightFormat.BF16) is None


def test_the_most_tokens_of_one_call_match_at_both_ends():
    tokens, experts, hidden, inter, top_k = 131_072, 64, 512, 128, 8
    w13, w2 = weights_of(experts, hidden, inter)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    gate = torch.randn(experts, hidden, device="cuda", dtype=torch.bfloat16) / 16
    got = fused_moe_forward(x, gate, (w13, w2), top_k)
    for part in (slice(0, 256), slice(tokens - 256, tokens)):
        weights, ids = route_reference(torch.nn.functional.linear(x[part], gate), top_k)
        want = fused_moe_reference(x[part], w13, w2, weights, ids)
        assert match(got[part], want, WeightFormat.BF16) is None
    with pytest.raises(ValueError, match="131072"):
        fused_moe_forward(torch.zeros(tokens + 1, hidden, device="cuda", dtype=torch.bfloat16), gate, (w13, w2), top_k)


def test_a_forward_never_waits_for_the_gpu():
    w13, w2 = weights_of(8, 512, 256)
    gate = torch.randn(8, 512, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(65, 512, device="cuda", dtype=torch.bfloat16)
    fused_moe_forward(x, gate, (w13, w2), 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_moe_forward(x, gate, (w13, w2), 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
