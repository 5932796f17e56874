"""The bounds agree with tables that were computed apart, and the expectations with a simulated router."""

from __future__ import annotations

import random

import pytest

from moetune.models import roofline
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.shape import MoEShape, WeightFormat

BYTES_PER_S, FLOPS = 4.3e12, 790e12  # what an H200 copies and multiplies

MIXTRAL = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
QWEN3 = MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8)
DEEPSEEK = MoEShape(hidden=7168, inter=2048, local_experts=256, top_k=8)
GPT_OSS = MoEShape(hidden=2880, inter=2880, local_experts=128, top_k=4)

# Microseconds per token count, worked out apart from this code for the ceilings above.
BOUNDS_US = {
    "mixtral": (MIXTRAL, {1: 164, 16: 649, 64: 656, 256: 656, 1024: 913, 4096: 3653, 16384: 14614}),
    "qwen3-30b": (QWEN3, {1: 17.6, 16: 181, 64: 277, 256: 281, 1024: 283, 4096: 391, 16384: 1566}),
    "deepseek-v3": (DEEPSEEK, {1: 164, 16: 2089, 64: 4557, 256: 5244, 1024: 5251, 4096: 5271, 16384: 14614}),
    "gpt-oss-120b": (GPT_OSS, {1: 46.3, 16: 590, 64: 1287, 256: 1482, 1024: 1484, 4096: 1492, 16384: 4128}),
}


@pytest.mark.parametrize(("shape", "expected"), BOUNDS_US.values(), ids=BOUNDS_US)
def test_layer_bounds_agree_with_a_table_computed_apart(shape: MoEShape, expected: dict[int, float]) -> None:
    for tokens, bound_us in expected.items():
        got = roofline.bound_us(roofline.layer_work(shape, tokens), BYTES_PER_S, FLOPS)
        assert got == pytest.approx(bound_us, rel=4e-3), tokens


@pytest.mark.parametrize(
    ("weights", "tokens", "bound_us"),
    [
        (WeightFormat.FP8, 16, 325),
        (WeightFormat.INT4, 16, 167),
        (WeightFormat.MXFP4, 16, 172),
        (WeightFormat.MXFP4, 1, 43.5),
    ],
    ids=["fp8", "int4-with-scales", "mxfp4-with-scales", "mxfp4-one-token"],
)
def test_scales_of_quantised_weights_are_counted(weights: WeightFormat, tokens: int, bound_us: float) -> None:
    shape = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2, format=weights)
    assert roofline.bound_us(roofline.layer_work(shape, tokens), BYTES_PER_S, FLOPS) == pytest.approx(
        bound_us, rel=5e-3
    )


def test_one_token_touches_exactly_top_k_experts() -> None:
    assert roofline.expected_touched_experts(QWEN3, 1) == pytest.approx(8)


@pytest.mark.parametrize(
    ("tokens", "block_m", "ratio"), [(64, 16, 3.9), (64, 64, 16), (256, 32, 2.0), (1024, 64, 1.46), (4096, 128, 1.25)]
)
def test_padding_of_uniform_routing_agrees_with_a_table_computed_apart(tokens: int, block_m: int, ratio: float) -> None:
    rows = roofline.expected_executed_rows(QWEN3, tokens, block_m)
    assert rows / roofline.expected_slots(QWEN3, tokens) == pytest.approx(ratio, rel=0.02)


def test_expected_padding_agrees_with_a_simulated_router() -> None:
    draw, totals = random.Random(7), []
    for _ in range(200):
        counts = [0] * 128
        for _ in range(100):
            for expert in draw.sample(range(128), 8):
                counts[expert] += 1
        totals.append(roofline.executed_rows(counts, 16))
    assert roofline.expected_executed_rows(QWEN3, 100, 16) == pytest.approx(sum(totals) / len(totals), rel=0.01)


def test_padding_stays_finite_at_the_largest_token_count() -> None:
    rows = roofline.expected_executed_rows(QWEN3, 131_072, 256)
    assert 1.0 <= rows / roofline.expected_slots(QWEN3, 131_072) < 1.03


def test_a_rank_of_an_expert_parallel_model_counts_only_its_own_experts() -> None:
    rank = MoEShape(hidden=2048, inter=768, local_experts=32, top_k=8, experts=128)
    whole, part = roofline.layer_work(QWEN3, 512), roofline.layer_work(rank, 512)
    assert part.flops == pytest.approx(whole.flops / 4)
    assert part.touched_experts == pytest.approx(whole.touched_experts / 4)


def test_the_two_kernels_together_do_the_flops_and_read_the_weights_of_the_layer() -> None:
    layer = roofline.layer_work(MIXTRAL, 64)
    parts = [roofline.kernel_work(MIXTRAL, 64, role) for role in Role]
    assert sum(part.flops for part in parts) == pytest.approx(layer.flops)
    assert sum(part.weight_bytes for part in parts) == pytest.approx(layer.weight_bytes)
    assert sum(part.bytes_min for part in parts) > layer.bytes_min  # h and y cross DRAM between kernels


def test_real_counts_replace_the_expectation() -> None:
    work = roofline.layer_work(MIXTRAL, 64, touched_experts=1, slots=128)
    assert work.weight_bytes == MIXTRAL.expert_bytes
    assert work.flops == 6 * 128 * 4096 * 14336


def test_tiles_and_steps_round_up_where_sizes_do_not_divide() -> None:
    config = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
    shape = MoEShape(hidden=97, inter=47, local_experts=4, top_k=1)
    assert roofline.tiles(config, shape, Role.GATE_UP, [0, 1, 16, 17]) == 4 * 1
    assert roofline.tiles(config, shape, Role.DOWN, [0, 1, 16, 17]) == 4 * 2
    assert roofline.steps(config, shape, Role.GATE_UP) == 2
    assert roofline.steps(config, shape, Role.DOWN) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_nominal_peaks_with_a_source(target: str) -> None:
    peaks = roofline.nominal_peaks(TARGETS[target])
    assert peaks is not None
    assert peaks.source
    assert 50 < peaks.flops / peaks.bytes_per_s < 450  # FLOPs per byte at the ridge of any GPU listed


def test_large_batches_are_limited_by_compute_and_small_ones_by_memory() -> None:
    assert roofline.limit(roofline.layer_work(MIXTRAL, 16), BYTES_PER_S, FLOPS) is roofline.Limit.MEMORY
    assert roofline.limit(roofline.layer_work(MIXTRAL, 4096), BYTES_PER_S, FLOPS) is roofline.Limit.COMPUTE
