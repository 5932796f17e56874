"""A kernel that the GPU refuses never stops a forward that asked for no plan, and names itself where one was given."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from triton.runtime.errors import OutOfResources, PTXASError

from moetune_kernels import LayerPlan, MoEKernelConfig, Structure, fused_moe, fused_moe_forward, route
from moetune_kernels.errors import UnsupportedConfigError
from moetune_kernels.fused_moe import fused_moe_reference, layer
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.lookup import Resolved, reload
from moetune_kernels.match import match
from moetune_kernels.shape import WeightFormat

SMALL = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=32, block_k=32)
TUNED = LayerPlan(gate_up=SMALL, down=replace(SMALL, block_n=16, block_m=16))


TOO_BIG = OutOfResources(147_456, 101_376, "shared memory")


@pytest.fixture(params=[TOO_BIG])
def served(monkeypatch, request):
    """Let a table answer with TUNED, whose down kernel the GPU refuses; return the plans that were tried."""
    reload()
    tried, errors = [], cycle([request.param])
    run_experts = layer._run_experts

    def refuse(x, weights, routed, plan, out):
        tried.append(plan)
        if plan == TUNED:
            raise next(errors)
        run_experts(x, weights, routed, plan, out)

    monkeypatch.setattr(layer, "_run_experts", refuse)
    monkeypatch.setattr(layer, "best_plan", lambda *_: Resolved(TUNED, "table", "here.json", 5, "a table"))
    monkeypatch.setattr(layer, "_refused", set())
    yield tried
    reload()


def call():
    gen = torch.Generator().manual_seed(0)
    weights, ids = route(torch.randn(5, 6, generator=gen), 2)
    x, w13 = torch.randn(5, 64, generator=gen).half(), (torch.randn(6, 64, 64, generator=gen) / 8).half()
    return x, w13, (torch.randn(6, 64, 32, generator=gen) / 6).half(), weights, ids


def test_the_default_plan_takes_over_with_one_warning_and_is_remembered(served, caplog):
    args = call()
    with caplog.at_level(logging.WARNING, logger="moetune"):
        for _ in range(3):
            assert match(fused_moe(*args), fused_moe_reference(*args), WeightFormat.FP16) is None
        gate = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).half()
        assert fused_moe_forward(args[0], gate, args[1:3]).isfinite().all()
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1
    assert "147456" in warned[0]
    assert "101376" in warned[0]
    assert served.count(TUNED) == 1
    assert len(served) == 5


def test_a_plan_that_was_given_is_named_and_not_replaced(served):
    args = call()
    with pytest.raises(UnsupportedConfigError, match=r"147456.*101376"):
        fused_moe(*args, plan=TUNED)
    assert served == [TUNED]


def test_a_default_plan_that_is_refused_too_is_one_error_of_ours(served, monkeypatch):
    monkeypatch.setattr(layer, "heuristic_plan", lambda *_: TUNED)
    with pytest.raises(UnsupportedConfigError, match="101376"):
        fused_moe(*call())


@pytest.mark.parametrize(
    "served", [PTXASError("too few registers"), RuntimeError("PassManager::run failed")], indirect=True, ids=repr
)
def test_a_plan_that_this_triton_cannot_compile_is_replaced_too(served):
    args = call()
    assert match(fused_moe(*args), fused_moe_reference(*args), WeightFormat.FP16) is None
    assert len(served) == 2
    with pytest.raises(UnsupportedConfigError, match="refuses"):
        fused_moe(*args, plan=TUNED)


@pytest.mark.parametrize("served", [RuntimeError("CUDA error: misaligned address")], indirect=True, ids=repr)
def test_a_fault_of_the_gpu_is_no_refusal(served):
    with pytest.raises(RuntimeError, match="misaligned"):
        fused_moe(*call())
    assert served == [TUNED]


def test_the_default_plan_is_another_than_the_refused_one():
    weights = layer.Weights(*call()[1:3])
    assert heuristic_plan(weights.shape(2), 5, layer.device_of(weights.w2)) != TUNED


@pytest.mark.parametrize("tokens", [3, 40])
def test_debug_checks_let_a_router_choose_experts_of_other_ranks(monkeypatch, caplog, tokens):
    monkeypatch.setenv("MOETUNE_DEBUG", "2")
    _, w13, w2, _, _ = call()
    gen = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 64, generator=gen).half()
    gate = (torch.randn(12, 64, generator=gen) / 8).half()  # twelve experts, this rank holds six
    with caplog.at_level(logging.INFO, logger="moetune"):
        got = fused_moe_forward(x, gate, (w13, w2), plan=LayerPlan(gate_up=SMALL, down=SMALL))
    weights, ids = route(torch.nn.functional.linear(x, gate), 2)
    assert match(got, fused_moe_reference(x, w13, w2, weights, ids), WeightFormat.FP16) is None
    assert "histogram" in caplog.text
