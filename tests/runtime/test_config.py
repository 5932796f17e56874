"""A kernel's launch choice: born valid, and honest about where it cannot run."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.errors import UnsupportedConfigError
from moetune_kernels.shape import MoEShape, WeightFormat

H200, A10, A100, MI300 = (TARGETS[name] for name in ("sm_90", "sm_86", "sm_80", "gfx942"))
SHAPE = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=128)


def config(**change) -> MoEKernelConfig:
    return replace(CONFIG, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"block_m": 8}, {"block_n": 48}, {"block_k": 512}, {"block_k": 64.0}, {"block_m": True}, {"num_warps": 3},
        {"num_warps": 0}, {"prefetch_distance": 0}, {"prefetch_distance": 99}, {"group_m": 0}, {"split_k": 0},
        {"warp_size": 16}, {"max_registers": 8}, {"smem_size": 0}, {"smem_size": 1 << 40}, {"structure": "gather"},
    ],
    ids=str,
)  # fmt: skip
def test_a_field_out_of_range_is_refused_by_name(change):
    with pytest.raises(UnsupportedConfigError, match=next(iter(change))):
        config(**change)


def test_json_carries_the_studys_five_names_and_comes_back():
    tuned = config(num_warps=8, prefetch_distance=4, max_registers=128, smem_size=98304)
    document = tuned.to_json()
    studied = {name: document[name] for name in ("block_size", "warp_size", "smem_size", "prefetch_distance")}
    assert studied == {"block_size": 256, "warp_size": 32, "smem_size": 98304, "prefetch_distance": 4}
    assert document["max_registers"] == 128
    assert MoEKernelConfig.from_json(document) == tuned


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"block_size": 99}, "block_size"),
        ({"structure": "warp_magic"}, "structure"),
        ({"structure": {}}, "structure"),
        ({"num_stages": 3}, "num_stages"),
        ({"block_m": float("nan")}, "block_m"),
        ({"num_warps": None}, "num_warps"),
    ],
    ids=str,
)
def test_a_wrong_json_field_is_refused_by_name(change, named):
    with pytest.raises(UnsupportedConfigError, match=named):
        MoEKernelConfig.from_json(CONFIG.to_json() | change)


@pytest.mark.parametrize("value", [None, [], "gather", 1.5], ids=str)
def test_something_that_is_no_object_is_refused(value):
    with pytest.raises(UnsupportedConfigError, match="must be an object"):
        MoEKernelConfig.from_json(value)


def test_launch_keywords_are_tritons_own():
    assert config().launch_kwargs() == {"num_warps": 4, "num_stages": 3}
    assert config(max_registers=96).launch_kwargs()["maxnreg"] == 96


def test_shared_memory_over_the_limit_names_both_numbers():
    wide = config(block_m=256, block_n=256, block_k=128, num_warps=16, prefetch_distance=4)
    reason = wide.why_not(H200, SHAPE, Role.DOWN)
    assert reason is not None
    assert "524,288" in reason
    assert "232,448" in reason


def test_a_config_made_for_a_large_gpu_is_refused_on_a_small_one():
    large = config(block_m=128, block_n=256, block_k=64, num_warps=16, prefetch_distance=4)
    assert large.why_not(A100, SHAPE, Role.DOWN) is None
    assert "101,376" in (large.why_not(A10, SHAPE, Role.DOWN) or "")


def test_a_ceiling_does_not_lift_the_devices_limit():
    capped = config(block_m=128, block_n=256, block_k=64, num_warps=8, prefetch_distance=4, smem_size=101_376)
    assert "shared memory" in (capped.why_not(A10, SHAPE, Role.DOWN) or "")


@pytest.mark.parametrize(
    ("change", "device", "shape", "role", "says"),
    [
        ({}, A10, replace(SHAPE, format=WeightFormat.FP8), Role.DOWN, "fp8"),
        ({}, replace(A10, sm=75), SHAPE, Role.DOWN, "8.0"),
        ({"split_k": 2}, H200, SHAPE, Role.DOWN, "split-K"),
        ({"warp_size": 64}, H200, SHAPE, Role.DOWN, "32 threads"),
        ({}, MI300, SHAPE, Role.DOWN, "64 threads"),
        ({"structure": Structure.TMA}, A100, SHAPE, Role.DOWN, "9.0"),
        ({"structure": Structure.TMA, "warp_size": 64}, MI300, SHAPE, Role.DOWN, "9.0"),
        ({"structure": Structure.TMA_PERMUTE}, H200, SHAPE, Role.DOWN, "gate-up"),
        ({"structure": Structure.TMA}, H200, replace(SHAPE, hidden=97), Role.GATE_UP, "16 bytes"),
        ({"structure": Structure.TMA}, H200, replace(SHAPE, hidden=2880), Role.GATE_UP, "K tail"),
        ({"block_m": 128, "block_n": 128, "num_warps": 4}, H200, SHAPE, Role.GATE_UP, "accumulator"),
        ({"block_m": 64, "block_n": 64, "max_registers": 64}, H200, SHAPE, Role.GATE_UP, "max_registers"),
    ],
)
def test_what_cannot_run_says_why(change, device, shape, role, says):
    assert says in (config(**change).why_not(device, shape, role) or "")


def test_tma_takes_2880_columns_in_steps_of_64():
    tma = config(structure=Structure.TMA, block_k=64)
    assert tma.why_not(H200, replace(SHAPE, hidden=2880), Role.GATE_UP) is None


def test_every_field_but_the_tile_has_a_default():
    assert {field.name for field in fields(CONFIG)} >= {"structure", "max_registers", "smem_size", "warp_size"}
    assert CONFIG.block_size == 128
