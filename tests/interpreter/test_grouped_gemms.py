"""Gate-up, down and combine of every structure against float32, on hostile routings and odd sizes."""

from __future__ import annotations

import pytest
import torch

from moetune_kernels.combine import combine, combine_reference
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.down import down, down_reference
from moetune_kernels.gate_up import gate_up, gate_up_reference
from moetune_kernels.match import match
from moetune_kernels.permute import permute
from moetune_kernels.shape import MoEShape, WeightFormat

# The tile past a block's end multiplies rows that nothing wrote: NaN that is never stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

EXPERTS = 6
ROUTINGS = {
    "random": lambda: torch.randint(0, EXPERTS, (37, 3), generator=torch.Generator().manual_seed(0)),
    "two-experts-left-empty": lambda: torch.tensor([[0, 5], [5, 0], [0, 3], [2, 5]]),
    "all-tokens-to-one-expert": lambda: torch.full((35, 1), 4),
    "some-slots-not-routed": lambda: torch.tensor([[0, -1], [-1, -1], [6, 2], [2_000_000_000, 2]]),
    "one-token": lambda: torch.tensor([[1, 3]]),
}
SIZES = {"round": (96, 64), "odd": (97, 47), "gpt-oss-like": (160, 176)}  # H, I; 160 and 176 have a K tail of 32
CONFIGS = [
    MoEKernelConfig(structure=structure, block_m=block_m, block_n=block_n, block_k=block_k, group_m=group_m)
    for structure in Structure
    for block_m, block_n, block_k, group_m in ((16, 32, 16, 1), (32, 64, 32, 4))
]


def layer(size: str, routing: str):
    hidden, inter = SIZES[size]
    gen = torch.Generator().manual_seed(7)
    ids = ROUTINGS[routing]()
    x = torch.randn(ids.shape[0], hidden, generator=gen).half()
    w13 = (torch.randn(EXPERTS, 2 * inter, hidden, generator=gen) / hidden**0.5).half()
    w2 = (torch.randn(EXPERTS, hidden, inter, generator=gen) / inter**0.5).half()
    return x, w13, w2, torch.rand(ids.shape, generator=gen), ids


def legal(role: Role) -> list:
    """Every config on every size that its own rules allow: the odd sizes are for gather alone."""
    cases = []
    for size, (hidden, inter) in SIZES.items():
        shape = MoEShape(hidden=hidden, inter=inter, local_experts=EXPERTS, top_k=1, format=WeightFormat.FP16)
        for config in CONFIGS:
            if config.why_not(TARGETS["sm_90"], shape, role) is None:
                name = f"{size}-{config.structure.value}-{config.block_m}x{config.block_n}x{config.block_k}"
                cases.append(pytest.param(size, config, id=name))
    return cases


@pytest.mark.parametrize(("size", "config"), legal(Role.GATE_UP))
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gate_up_matches_float32(routing, size, config):
    x, w13, _, _, ids = layer(size, routing)
    order = permute(ids, EXPERTS, config.block_m)
    h = gate_up(x, w13, order, config)
    routed = int(order.expert_offsets[-1])
    want = gate_up_reference(x, w13, ids)[order.slots[:routed].long()]
    assert match(h[:routed], want, WeightFormat.FP16) is None


@pytest.mark.parametrize(("size", "config"), legal(Role.DOWN))
@pytest.mark.parametrize("routing", ROUTINGS)
def test_down_and_combine_match_float32(routing, size, config):
    x, w13, w2, weights, ids = layer(size, routing)
    order = permute(ids, EXPERTS, config.block_m)
    routed = order.slots[: int(order.expert_offsets[-1])].long()
    want_h = gate_up_reference(x, w13, ids)
    h = torch.empty((ids.numel(), w2.shape[2]), dtype=torch.float16)
    h[: routed.numel()] = want_h[routed].half()
    y = down(h, w2, order, weights, config)
    want = down_reference(want_h.half(), w2, weights, ids)
    assert match(y[routed], want[routed], WeightFormat.FP16) is None
    assert match(combine(y, ids, EXPERTS), combine_reference(want, ids, EXPERTS), WeightFormat.FP16) is None


def test_a_planted_error_in_one_row_is_no_match():
    want = torch.ones(2000, 64)
    got = want.clone()
    got[7] *= 1.02  # 0.04% of the output: only the rule on rows can see it
    assert "row 7" in (match(got, want, WeightFormat.FP16) or "")
    got[7] = torch.nan
    assert "not finite" in (match(got, want, WeightFormat.FP16) or "")
    assert match(want, want, WeightFormat.FP16) is None


def test_an_order_of_another_block_m_is_refused():
    x, w13, _, _, ids = layer("round", "random")
    with pytest.raises(ValueError, match="block_m"):
        gate_up(x, w13, permute(ids, EXPERTS, 64), CONFIGS[0])
