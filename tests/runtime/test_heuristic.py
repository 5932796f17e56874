"""The default plan: legal wherever it may be asked for, and sensible where it was measured."""

from __future__ import annotations

import random

import pytest

from moetune_kernels.config import Role, Structure
from moetune_kernels.device import TARGETS, DeviceInfo
from moetune_kernels.errors import ShapeError, UnsupportedConfigError
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.shape import MAX_EXPERT_WEIGHTS, MAX_TOKENS, MoEShape, WeightFormat

QWEN3_30B = MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8)
MIXTRAL = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
PUBLISHED = (
    QWEN3_30B, MIXTRAL, MoEShape(hidden=4096, inter=14336, local_experts=64, top_k=2),
    MoEShape(hidden=7168, inter=2048, local_experts=256, top_k=8), MoEShape(hidden=2880, inter=2880, local_experts=128, top_k=4),
)  # fmt: skip
TOKENS = (0, 1, 2, 7, 16, 64, 100, 256, 1000, 4096, 16384, MAX_TOKENS)


def random_shape(random_: random.Random) -> MoEShape:
    """Return any legal shape, odd and tiny sizes included."""

    def size() -> int:
        kinds = (random_.randint(1, 40), random_.randint(41, 5000), 16 * random_.randint(1, 400), 97, 47, 2880, 1 << 20)
        return random_.choice(kinds)

    local = random_.choice((1, 2, 5, 8, 60, 128, 384, 1024))
    experts = random_.choice((None, local, local * 8))
    top_k = random_.randint(1, min(16, experts or local))
    kind = random_.choice((WeightFormat.BF16, WeightFormat.FP16))
    hidden, inter = size(), size()
    if hidden * inter > MAX_EXPERT_WEIGHTS:
        inter = 47
    return MoEShape(hidden=hidden, inter=inter, local_experts=local, top_k=top_k, experts=experts, format=kind)


@pytest.mark.parametrize("name", TARGETS)
def test_every_published_shape_has_a_default_plan_that_runs(name):
    for shape in PUBLISHED:
        for tokens in TOKENS:
            assert heuristic_plan(shape, tokens, TARGETS[name]).why_not(TARGETS[name], shape) is None


@pytest.mark.parametrize("name", TARGETS)
def test_any_legal_shape_has_a_default_plan_that_runs(name):
    random_ = random.Random(name)
    for _ in range(300):
        shape, tokens = random_shape(random_), random_.choice(TOKENS)
        assert heuristic_plan(shape, tokens, TARGETS[name]).why_not(TARGETS[name], shape) is None, (shape, tokens)


@pytest.mark.parametrize("smem_limit", [49_152, 65_536, 101_376, 166_912, 232_448])
@pytest.mark.parametrize("sm", [80, 87, 90, 103, 121])
def test_a_device_that_nobody_listed_gets_a_plan_that_fits(sm, smem_limit):
    device = DeviceInfo(
        name="Unheard Of", sm=sm, sm_count=20, memory_bytes=8 << 30, l2_bytes=4 << 20, smem_limit=smem_limit
    )
    for tokens in TOKENS:
        assert heuristic_plan(MIXTRAL, tokens, device).why_not(device, MIXTRAL) is None


@pytest.mark.parametrize(("rows", "block_m"), [(1, 16), (12, 16), (13, 32), (24, 32), (25, 64), (48, 64), (49, 128)])
def test_rows_per_expert_choose_the_tiles_height(rows, block_m):
    one_expert = MoEShape(hidden=2048, inter=768, local_experts=1, top_k=1)
    assert heuristic_plan(one_expert, rows, TARGETS["sm_90"]).block_m == block_m


def test_a_rank_that_holds_an_eighth_of_the_experts_plans_for_an_eighth_of_the_rows():
    rank = MoEShape(hidden=2048, inter=768, local_experts=16, top_k=8, experts=128)
    whole = heuristic_plan(QWEN3_30B, 256, TARGETS["sm_90"])
    assert heuristic_plan(rank, 256, TARGETS["sm_90"]).block_m == whole.block_m == 32


def test_an_h200_decodes_by_gather_and_prefills_by_tma():
    h200 = TARGETS["sm_90"]
    decode, prefill = heuristic_plan(QWEN3_30B, 16, h200), heuristic_plan(QWEN3_30B, 16384, h200)
    assert {decode.config(role).structure for role in Role} == {Structure.GATHER}
    assert {prefill.config(role).structure for role in Role} == {Structure.TMA}
    assert (prefill.gate_up.block_m, prefill.gate_up.block_n, prefill.gate_up.num_warps) == (128, 128, 8)


def test_sizes_that_tma_refuses_fall_back_to_gather():
    odd = MoEShape(hidden=97, inter=47, local_experts=4, top_k=2)
    plan = heuristic_plan(odd, 16384, TARGETS["sm_90"])
    assert {plan.config(role).structure for role in Role} == {Structure.GATHER}
    half = heuristic_plan(MoEShape(hidden=2048, inter=47, local_experts=4, top_k=2), 16384, TARGETS["sm_90"])
    assert (half.gate_up.structure, half.down.structure) == (Structure.TMA, Structure.GATHER)


@pytest.mark.parametrize("tokens", TOKENS)
def test_an_a100_gets_256_threads_and_at_most_96_kb(tokens):
    a100 = TARGETS["sm_80"]
    plan = heuristic_plan(MIXTRAL, tokens, a100)
    for role in Role:
        assert plan.config(role).block_size == 256
        assert plan.config(role).smem_estimate(a100.sm, MIXTRAL, role) <= 96 * 1024


def test_decode_tiles_fill_the_last_wave():
    # One token touches 4 experts of 33 tiles each.
    narrow = heuristic_plan(MoEShape(hidden=2048, inter=1056, local_experts=128, top_k=4), 1, TARGETS["sm_90"])
    assert narrow.gate_up.block_n == 32  # 132 tiles, one full wave; 64 columns would make 68 of 132


def test_no_kernel_for_a_format_or_a_device_is_said():
    with pytest.raises(UnsupportedConfigError, match="int4"):
        heuristic_plan(
            MoEShape(hidden=64, inter=64, local_experts=2, top_k=1, format=WeightFormat.INT4), 1, TARGETS["sm_90"]
        )
    old = DeviceInfo(name="Tesla T4", sm=75, sm_count=40, memory_bytes=1 << 34, l2_bytes=1 << 22, smem_limit=65_536)
    with pytest.raises(UnsupportedConfigError, match=r"8\.0"):
        heuristic_plan(QWEN3_30B, 1, old)
    with pytest.raises(ShapeError, match="-1"):
        heuristic_plan(QWEN3_30B, -1, TARGETS["sm_90"])
