"""The rule that prunes by shared memory agrees with the compiler: never below it, at most about a stage above."""

from __future__ import annotations

import pytest

from moetune.outcome import Compiled
from moetune_kernels.config import BARRIER_BYTES, MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8)
# structure, block_m, block_n, block_k, warps, prefetch distance: decode and prefill tiles, and shallow ones whose
# output tile is larger than their pipeline
TILES = (
    (Structure.GATHER, 16, 64, 64, 4, 4),
    (Structure.GATHER, 64, 64, 64, 4, 3),
    (Structure.GATHER, 128, 64, 64, 8, 3),
    (Structure.GATHER, 128, 128, 16, 8, 2),
    (Structure.GATHER, 64, 128, 32, 4, 1),
    (Structure.TMA, 16, 64, 64, 4, 4),
    (Structure.TMA, 64, 128, 64, 4, 3),
    (Structure.TMA, 128, 128, 32, 8, 1),
    (Structure.TMA_PERMUTE, 128, 64, 64, 8, 4),
)


def choices(device):
    for structure, block_m, block_n, block_k, warps, stages in TILES:
        config = MoEKernelConfig(
            structure=structure,
            block_m=block_m,
            block_n=block_n,
            block_k=block_k,
            num_warps=warps,
            prefetch_distance=stages,
        )
        for role in Role:
            if config.why_not(device, SHAPE, role) is None:
                yield role, config


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_the_estimate_is_never_below_the_compiler_and_at_most_a_stage_above(compile_layer, target):
    device = TARGETS[target]
    ended = compile_layer(SHAPE, device, choices(device))
    assert len(ended) >= 9
    for (role, config), compiled in ended:
        assert isinstance(compiled, Compiled), (role, config, compiled)
        estimate = config.smem_estimate(device.sm, SHAPE, role)
        tiles = 2 if role is Role.GATE_UP else 1
        stage = (config.block_m + tiles * config.block_n) * config.block_k * 2
        store = config.block_m * config.block_n * 2
        assert compiled.smem_bytes <= estimate, (role, config)
        assert estimate <= max(compiled.smem_bytes + stage + BARRIER_BYTES, store), (role, config)
