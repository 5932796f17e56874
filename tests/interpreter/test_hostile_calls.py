"""What callers get wrong: each mistake is one clear error of ours, before anything is launched, and never a wrong answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moetune_kernels import (
    FusedMoE,
    LayerPlan,
    MoEKernelConfig,
    Structure,
    fused_moe,
    fused_moe_forward,
    permute,
    route,
)
from moetune_kernels.errors import MoetuneError, ShapeError, UnsupportedConfigError

SMALL = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=32, block_k=32)
TMA = replace(SMALL, structure=Structure.TMA)
PLAN, TMA_PLAN = LayerPlan(gate_up=SMALL, down=SMALL), LayerPlan(gate_up=TMA, down=TMA)
HUGE = 10**5000  # Python prints no such number


def arguments() -> dict:
    """Return a sound call: 5 tokens, H=64, I=32, 6 experts, 2 per token."""
    gen = torch.Generator().manual_seed(0)
    weights, ids = route(torch.randn(5, 6, generator=gen), 2)
    return {
        "x": torch.randn(5, 64, generator=gen).half(),
        "w13": (torch.randn(6, 64, 64, generator=gen) / 8).half(),
        "w2": (torch.randn(6, 64, 32, generator=gen) / 6).half(),
        "topk_weights": weights,
        "topk_ids": ids,
    }


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that starts 2 bytes past a 16-byte boundary."""
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    memory[1:] = tensor.flatten()
    return memory[1:].view(tensor.shape)


CALLS = {
    "no tensor": (lambda a: a | {"x": [1.0]}, "x must be a torch.Tensor"),
    "a sparse tensor": (lambda a: a | {"x": a["x"].to_sparse()}, "dense"),
    "x without dimensions": (lambda a: a | {"x": a["x"][0, 0]}, "x must be"),
    "ids without dimensions": (lambda a: a | {"topk_ids": a["topk_ids"][0, 0]}, "topk_ids"),
    "no experts": (lambda a: a | {"w13": a["w13"][:0], "w2": a["w2"][:0]}, "1 to 1024 experts"),
    "a router's limit passed": (
        lambda a: a | {"w13": torch.zeros(1025, 2, 64).half(), "w2": torch.zeros(1025, 64, 1).half()},
        "1 to 1024 experts",
    ),
    "17 choices": (
        lambda a: a | {"topk_weights": torch.zeros(5, 17), "topk_ids": torch.zeros(5, 17).int()},
        "1 to 16 columns",
    ),
    "no columns": (lambda a: a | {"x": a["x"][:, :0], "w13": a["w13"][:, :, :0], "w2": a["w2"][:, :0]}, "hidden"),
    "no intermediate": (lambda a: a | {"w13": a["w13"][:, :0], "w2": a["w2"][:, :, :0]}, "inter"),
    "no choices": (lambda a: a | {key: a[key][:, :0] for key in ("topk_weights", "topk_ids")}, "1 to 16 columns"),
    "weights left on meta": (lambda a: a | {"w13": a["w13"].to("meta")}, "w13 is on meta"),
    "ids left on meta": (lambda a: a | {"topk_ids": a["topk_ids"].to("meta")}, "topk_ids is on meta"),
    "out on meta": (lambda a: a | {"out": a["x"].to("meta")}, "out is on meta"),
    "out is a list": (lambda a: a | {"out": [1]}, "out must be a torch.Tensor"),
    "w13 off the boundary": (lambda a: a | {"w13": off_by_one(a["w13"]), "plan": TMA_PLAN}, "w13 must start on"),
    "w2 off the boundary": (lambda a: a | {"w2": off_by_one(a["w2"]), "plan": TMA_PLAN}, "w2 must start on"),
    "another activation": (lambda a: a | {"activation": None}, "activation"),
    "a plan as a dict": (lambda a: a | {"plan": PLAN.to_json()}, "plan must be a LayerPlan"),
    "a plan as text": (lambda a: a | {"plan": PLAN.text}, "plan must be a LayerPlan"),
    "an empty text for a plan": (lambda a: a | {"plan": ""}, "plan must be a LayerPlan"),
}


@pytest.mark.parametrize(("change", "says"), CALLS.values(), ids=CALLS)
def test_a_call_that_cannot_be_right_is_refused_by_name(change, says):
    with pytest.raises(MoetuneError, match=says):
        fused_moe(**change(arguments()))


@pytest.mark.parametrize("plan", [None, PLAN, TMA_PLAN], ids=["looked-up", "gather", "tma"])
def test_x_may_start_anywhere(plan):
    args = arguments()
    want = fused_moe(**args, plan=plan)
    assert torch.equal(fused_moe(**args | {"x": off_by_one(args["x"])}, plan=plan), want)


GATES = {
    "another dtype": (lambda gate: gate.float(), "gate_weights must be torch.float16"),
    "one dimension": (lambda gate: gate[0], "gate_weights"),
    "another hidden size": (lambda gate: gate[:, :32], "gate_weights"),
    "left on meta": (lambda gate: gate.to("meta"), "gate_weights is on meta"),
    "no tensor": (lambda gate: gate.tolist(), "gate_weights must be a torch.Tensor"),
    "no experts": (lambda gate: gate[:0], "top_k"),
}


@pytest.mark.parametrize(("change", "says"), GATES.values(), ids=GATES)
def test_a_router_that_does_not_fit_is_refused_by_name(change, says):
    args = arguments()
    with pytest.raises(ShapeError, match=says):
        fused_moe_forward(args["x"], change(torch.zeros(6, 64).half()), (args["w13"], args["w2"]))


@pytest.mark.parametrize("experts", [(), ("w13",), ("w13", "w2", "w2"), None, "w13"], ids=str)
def test_expert_weights_that_are_no_pair_are_refused(experts):
    args = arguments()
    given = args["w13"] if experts == "w13" else experts and tuple(args[name] for name in experts)
    with pytest.raises(ShapeError, match="pair"):
        fused_moe_forward(args["x"], torch.zeros(6, 64).half(), given)


@pytest.mark.parametrize(
    "value", [0, -1, 7, 2.0, True, "2", None, float("nan"), 1 << 70, HUGE], ids=lambda v: repr(type(v))
)
def test_a_top_k_that_is_no_count_is_refused(value):
    args = arguments()
    with pytest.raises(ShapeError, match="top_k must be a whole number"):
        route(torch.zeros(3, 6), value)
    with pytest.raises(ShapeError, match="top_k must be a whole number"):
        fused_moe_forward(args["x"], torch.zeros(6, 64).half(), (args["w13"], args["w2"]), value)


@pytest.mark.parametrize("value", [0, 2.0, True, "16", None, HUGE], ids=lambda v: repr(type(v)))
def test_an_order_of_no_count_is_refused(value):
    ids = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ShapeError, match="num_experts must be"):
        permute(ids, value, 16)
    with pytest.raises(ShapeError, match="block_m must be"):
        permute(ids, 4, value)


def test_what_is_no_tensor_or_too_many_slots_is_refused():
    with pytest.raises(ShapeError, match="logits must be a"):
        route([[1.0]], 1)
    with pytest.raises(ShapeError, match="topk_ids must be a"):
        permute([[1]], 1, 16)
    with pytest.raises(ShapeError, match="2,097,152"):
        permute(torch.zeros(1, dtype=torch.int32).expand(131_073, 16), 1, 16)


SIZES = {"hidden": 64, "inter": 32, "num_experts": 6}
MODULES = [
    ({"hidden": 0}, "hidden"), ({"hidden": -1}, "hidden"), ({"inter": 16.0}, "inter"), ({"num_experts": 1025}, "1024"),
    ({"top_k": 7}, "top_k"), ({"top_k": True}, "top_k"), ({"dtype": torch.float32}, "bfloat16"), ({"dtype": "half"}, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), MODULES, ids=str)
def test_a_module_that_could_never_run_is_refused_when_it_is_made(change, says):
    with pytest.raises(ShapeError, match=says):
        FusedMoE(**SIZES | change)


def test_the_module_takes_any_leading_dimensions_and_no_other_width():
    module = FusedMoE(**SIZES, dtype=torch.float16)
    for shape in ((64,), (0, 64), (0, 3, 64), (2, 1, 2, 64)):
        assert module(torch.zeros(shape).half()).shape == shape
    for shape in ((), (3, 32), (3, 0)):
        with pytest.raises(ShapeError, match="H=64"):
            module(torch.zeros(shape).half())


def test_a_backward_pass_is_one_clear_error():
    args = arguments()
    x = args.pop("x").requires_grad_()
    with pytest.raises(MoetuneError, match="no backward"):
        fused_moe(x, **args).sum().backward()
    module = FusedMoE(**SIZES, dtype=torch.float16)
    with pytest.raises(MoetuneError, match="no backward"):
        module(x).sum().backward()


def test_out_never_cuts_a_gradient_in_silence():
    args = arguments()
    args["x"].requires_grad_()
    out = torch.empty(5, 64).half()
    with pytest.raises(MoetuneError, match="x requires a gradient"):
        fused_moe(**args, out=out)
    with torch.no_grad():
        assert torch.equal(fused_moe(**args, out=out), fused_moe(**args))


def test_padding_rows_of_nan_leave_the_other_rows_as_they_are():
    args = arguments()
    gate, experts = torch.randn(6, 64).half(), (args["w13"], args["w2"])
    clean = fused_moe_forward(args["x"], gate, experts, plan=PLAN)
    args["x"][3] = torch.nan
    dirty = fused_moe_forward(args["x"], gate, experts, plan=PLAN)
    others = [0, 1, 2, 4]
    assert torch.equal(dirty[others], clean[others])


def test_a_plan_of_the_wrong_kind_of_tile_says_why_before_any_launch():
    with pytest.raises(UnsupportedConfigError, match="K tail"):
        fused_moe(**arguments(), plan=replace(TMA_PLAN, down=replace(TMA, block_k=64)))
