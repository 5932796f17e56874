"""Default plans compile for every target, shipped plans for their own device: within limits, almost without spills."""

from __future__ import annotations

import os

import pytest
import triton

from moetune.measure.offline import compile_offline, plan_choices
from moetune.outcome import Compiled
from moetune_kernels.device import TARGETS
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.paths import shipped_tables_dir
from moetune_kernels.shape import MoEShape
from moetune_kernels.table import TunedTable

SHIPPED = {
    f"{path.parent.name}/{path.stem}": TunedTable.parse(path.read_bytes(), str(path))
    for path in sorted(shipped_tables_dir().rglob("*.json"))
}
PUBLISHED = {
    "mixtral-8x7b": MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2),
    "default": MoEShape(hidden=4096, inter=14336, local_experts=64, top_k=2),
    "qwen3-30b-a3b": MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8),
    "gpt-oss-120b": MoEShape(hidden=2880, inter=2880, local_experts=128, top_k=4),
    "odd": MoEShape(hidden=97, inter=47, local_experts=5, top_k=2),
}
SHAPES = PUBLISHED | {
    table.shape.key: table.shape for table in SHIPPED.values() if table.shape not in PUBLISHED.values()
}
LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # what a sweep tunes
TOKENS = (1, 256, 16384)  # memory-bound, between, compute-bound: for shapes that do not ship, and for other Tritons
IS_OTHER_TRITON = "EXPECTED_TRITON" in os.environ
MAX_SPILLS = 16  # what a sweep still races
OTHER_TRITON_SPILLS = 64  # another compiler than a table's: slower by a little, not by a factor


def assert_usable(compiled, device, where, max_spills=MAX_SPILLS):
    assert isinstance(compiled, Compiled), f"{where}: {compiled}"
    assert compiled.smem_bytes <= device.smem_limit, where
    assert compiled.spills <= max_spills, f"{where}: {compiled.spills} spills"
    assert device.is_amd or compiled.registers >= 24, where


@pytest.mark.parametrize("target", TARGETS)
def test_default_plans_compile_and_fit(compile_layer, target):
    device, compiled = TARGETS[target], 0
    shipped = {table.shape for table in SHIPPED.values()}
    for name, shape in SHAPES.items():
        ladder = LADDER if shape in shipped and not IS_OTHER_TRITON else TOKENS
        choices = plan_choices(heuristic_plan(shape, tokens, device) for tokens in ladder)
        for (role, config), outcome in compile_layer(shape, device, choices):
            assert_usable(outcome, device, f"{name} {role.value} {config} on {target}")
            compiled += 1
    assert compiled >= 2 * len(SHAPES)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_plans_compile_for_their_own_device(compile_layer, name):
    table = SHIPPED[name]
    choices = plan_choices(entry.plan for entry in table.entries.values())
    assert choices
    max_spills = MAX_SPILLS if table.triton == triton.__version__ else OTHER_TRITON_SPILLS
    for (role, config), outcome in compile_layer(table.shape, table.device, choices):
        assert_usable(outcome, table.device, f"{name} {role.value} {config}", max_spills)


def test_offline_compilation_reports_what_a_sweep_prints():
    shape, device = PUBLISHED["qwen3-30b-a3b"], TARGETS["sm_90"]
    choices = plan_choices([heuristic_plan(shape, 1, device)])
    ended = dict(compile_offline(shape, device, choices, workers=1))
    assert set(ended) == set(choices)
    for (_, config), compiled in ended.items():
        assert compiled.block_size == config.block_size
        assert compiled.tensor_instruction == "HMMA"  # sixteen rows are too few for wgmma
