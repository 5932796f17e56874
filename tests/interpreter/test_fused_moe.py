"""The layer that users call: results, layouts, refusals, debug checks."""

from __future__ import annotations

import logging

import pytest
import torch

from moetune_kernels import (
    FusedMoE,
    LayerPlan,
    MoEKernelConfig,
    Structure,
    fused_moe,
    fused_moe_forward,
    launch_context,
    route,
)
from moetune_kernels.errors import MoetuneError, ShapeError, UnsupportedConfigError, UnsupportedDeviceError
from moetune_kernels.fused_moe import fused_moe_reference, layer
from moetune_kernels.match import match
from moetune_kernels.shape import WeightFormat

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
SMALL = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=32, block_k=32)
PLAN = LayerPlan(gate_up=SMALL, down=SMALL)


def tensors(tokens=5, hidden=64, inter=32, experts=6, top_k=2):
    gen = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=gen).half()
    w13 = (torch.randn(experts, 2 * inter, hidden, generator=gen) / hidden**0.5).half()
    w2 = (torch.randn(experts, hidden, inter, generator=gen) / inter**0.5).half()
    weights, ids = route(torch.randn(tokens, experts, generator=gen), top_k)
    return x, w13, w2, weights, ids


def check(got, x, w13, w2, weights, ids):
    assert match(got, fused_moe_reference(x, w13, w2, weights, ids), WeightFormat.FP16) is None


@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_the_layer_matches_float32_with_the_default_plan(tokens):
    args = tensors(tokens)
    check(fused_moe(*args), *args)


@pytest.mark.parametrize("tokens", [3, 40])
def test_logits_to_output_matches_route_then_layer(tokens):
    x, w13, w2, _, _ = tensors(tokens)
    gate = (torch.randn(6, 64) / 8).half()
    weights, ids = route(torch.nn.functional.linear(x, gate), 2)
    got = fused_moe_forward(x, gate, (w13, w2), top_k=2, plan=PLAN)
    check(got, x, w13, w2, weights, ids)


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_rank_that_holds_half_of_the_experts_computes_its_half(tokens):
    x, w13, w2, _, _ = tensors(tokens)
    gate = (torch.randn(12, 64) / 8).half()  # the router scores all twelve, this rank holds the first six
    weights, ids = route(torch.nn.functional.linear(x, gate), 2)
    got = fused_moe_forward(x, gate, (w13, w2), top_k=2, plan=PLAN)
    check(got, x, w13, w2, weights, ids)


def test_a_decode_layer_is_four_launches(monkeypatch):
    counted = []
    monkeypatch.setattr(layer, "launch_all", counted.extend)
    x, w13, w2, _, _ = tensors(8)
    layer.moe_from_logits(x, layer.Weights(w13, w2), torch.randn(8, 6), (2, True), PLAN)
    assert len(counted) == 4


def test_zero_tokens_give_zero_rows_and_the_next_call_is_right():
    x, w13, w2, weights, ids = tensors(5)
    empty = fused_moe(x[:0], w13, w2, weights[:0], ids[:0])
    assert empty.shape == (0, 64)
    assert empty.dtype == x.dtype
    check(fused_moe(x, w13, w2, weights, ids), x, w13, w2, weights, ids)


def test_strided_inputs_equal_their_contiguous_copies():
    x, w13, w2, weights, ids = tensors(7)
    wide_x = torch.zeros(7, 128).half()
    wide_x[:, ::2] = x
    wide_ids, wide_weights = torch.zeros(7, 8, dtype=torch.int64), torch.zeros(7, 8)
    wide_ids[:, :2], wide_weights[:, :2] = ids, weights
    want = fused_moe(x, w13, w2, weights, ids)
    assert torch.equal(fused_moe(wide_x[:, ::2], w13, w2, wide_weights[:, :2], wide_ids[:, :2]), want)
    assert torch.equal(fused_moe(x.t().contiguous().t(), w13, w2, weights, ids.long()), want)


def test_ids_cut_from_wider_rows_are_read_by_their_stride():
    x, w13, w2, weights, ids = tensors(33, experts=16, top_k=4)
    wide_ids, wide_weights = torch.full((33, 16), 15, dtype=torch.int32), torch.full((33, 16), torch.nan)
    wide_ids[:, :4], wide_weights[:, :4] = ids, weights
    assert wide_ids[:, :4].stride() == (16, 1)
    got = fused_moe(x, w13, w2, wide_weights[:, :4], wide_ids[:, :4])
    assert torch.equal(got, fused_moe(x, w13, w2, weights, ids))
    assert torch.equal(got, fused_moe(x, w13, w2, weights, ids.long()))
    check(got, x, w13, w2, weights, ids)


def test_ids_out_of_range_add_nothing():
    x, w13, w2, weights, ids = tensors(4)
    ids[0, 0], ids[1, 1], ids[3, 0], ids[3, 1] = 6, 2_000_000_000, -1, -1
    got = fused_moe(x, w13, w2, weights, ids)
    check(got, x, w13, w2, weights, ids)
    assert (got[3] == 0).all()


def test_gate_rows_come_first_and_up_rows_after():
    x = torch.ones(1, 2).half()
    w13 = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]]]).half()
    got = fused_moe(x, w13, torch.eye(2)[None].half(), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    torch.testing.assert_close(got.float(), torch.tensor([[1.4621, 2.1932]]), rtol=0, atol=2e-3)


def test_the_input_is_untouched_and_out_is_written():
    x, w13, w2, weights, ids = tensors(5)
    before, out = x.clone(), torch.empty(5, 64).half()
    assert fused_moe(x, w13, w2, weights, ids, out=out) is out
    assert torch.equal(x, before)
    check(out, x, w13, w2, weights, ids)


def test_out_that_shares_memory_is_refused():
    _, w13, w2, weights, ids = tensors(4)
    memory = torch.zeros(6, 64).half()
    for out in (memory[:4], memory[2:]):
        with pytest.raises(ShapeError, match="shares memory with x"):
            fused_moe(memory[:4], w13, w2, weights, ids, out=out)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda a: a | {"activation": "gelu"}, "activation"),
        (lambda a: a | {"w13": a["w13"][:, :, :32].contiguous()}, "w13"),
        (lambda a: a | {"w2": a["w2"].transpose(1, 2).contiguous().transpose(1, 2)}, "w2"),
        (lambda a: a | {"x": a["x"].float()}, "bfloat16"),
        (lambda a: a | {"topk_weights": a["topk_weights"].half()}, "float32"),
        (lambda a: a | {"topk_ids": a["topk_ids"][:3]}, "topk_ids"),
        (lambda a: a | {"topk_ids": a["topk_ids"].float()}, "int32"),
        (lambda a: a | {"x": a["x"][:, :32]}, "H=64"),
        (lambda a: a | {"out": torch.empty(5, 32).half()}, "out"),
    ],
    ids=["activation", "w13-hidden", "w2-strides", "dtype", "weights-dtype", "ids-rows", "ids-dtype", "hidden", "out"],
)
def test_what_does_not_fit_is_refused_by_name(change, names):
    args = dict(zip(("x", "w13", "w2", "topk_weights", "topk_ids"), tensors(5), strict=True))
    with pytest.raises(ShapeError, match=names):
        fused_moe(**change(args))


def test_a_plan_that_cannot_run_is_refused_with_its_reason():
    config = MoEKernelConfig(structure=Structure.TMA, block_m=16, block_n=32, block_k=32)
    args = tensors(5, inter=48)
    with pytest.raises(UnsupportedConfigError, match="K tail"):
        fused_moe(*args, plan=LayerPlan(gate_up=SMALL, down=config))


def test_cpu_tensors_without_the_interpreter_are_one_clear_error(monkeypatch):
    monkeypatch.setattr(launch_context, "_interpreted", lambda: False)
    with pytest.raises(UnsupportedDeviceError, match="TRITON_INTERPRET=1"):
        fused_moe(*tensors(5))


def test_the_module_keeps_leading_dimensions():
    module = FusedMoE(64, 32, 6, dtype=torch.float16)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    x = torch.randn(2, 3, 64).half()
    out = module(x)
    assert out.shape == x.shape
    weights, ids = route(torch.nn.functional.linear(x.view(6, 64), module.gate), 2)
    check(out.view(6, 64), x.view(6, 64), module.w13, module.w2, weights, ids)


def test_debug_level_two_names_the_kernel_that_wrote_nan(monkeypatch, caplog):
    monkeypatch.setenv("MOETUNE_DEBUG", "2")
    x, w13, w2, weights, ids = tensors(5)
    with caplog.at_level(logging.INFO, logger="moetune"):
        fused_moe(x, w13, w2, weights, ids, plan=PLAN)
    assert "histogram" in caplog.text
    w2[int(ids[0, 0])] = torch.inf
    with pytest.raises(MoetuneError, match="down wrote"):
        fused_moe(x, w13, w2, weights, ids, plan=PLAN)


def test_debug_level_two_names_the_token_and_slot_of_a_bad_id(monkeypatch):
    monkeypatch.setenv("MOETUNE_DEBUG", "2")
    x, w13, w2, weights, ids = tensors(5)
    ids[2, 1] = 6
    with pytest.raises(MoetuneError, match="token 2, slot 1"):
        fused_moe(x, w13, w2, weights, ids, plan=PLAN)


def test_full_graph_compilation_sees_one_node():
    args = tensors(5)
    compiled = torch.compile(lambda *a: fused_moe(*a, plan=PLAN) * 1.0, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*args), fused_moe(*args, plan=PLAN))


def test_the_fake_kernels_agree_with_the_real_ones():
    x, w13, w2, weights, ids = tensors(5)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.moetune.fused_moe.default, (x, w13, w2, weights, ids, PLAN.text), test_utils=checks)
    logits = torch.randn(5, 6)
    args = (x, w13, w2, logits, 2, True, PLAN.text)
    torch.library.opcheck(torch.ops.moetune.moe_from_logits.default, args, test_utils=checks)
