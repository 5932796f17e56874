"""A whole layer's choices, which two kernels share."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.errors import UnsupportedConfigError
from moetune_kernels.plan import LayerPlan, plan_from_text
from moetune_kernels.shape import MoEShape

GATE_UP = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=128)
PLAN = LayerPlan(gate_up=GATE_UP, down=replace(GATE_UP, block_n=128))
SHAPE = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)


def test_two_gemms_that_sort_by_different_block_m_never_make_a_plan():
    with pytest.raises(UnsupportedConfigError, match="block_m, got 16 and 64"):
        replace(PLAN, down=replace(GATE_UP, block_m=64))
    document = PLAN.to_json()
    document["down"]["block_m"] = 64
    with pytest.raises(UnsupportedConfigError, match="block_m, got 16 and 64"):
        LayerPlan.from_json(document)


def test_json_and_text_come_back_as_they_went_out():
    assert LayerPlan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN
    assert plan_from_text(PLAN.text) == PLAN


@pytest.mark.parametrize(
    "change", [{"routing": "psychic"}, {"combine": []}, {"gate_up": None}, {"down": {}}, {"gemm3": {}}], ids=str
)
def test_a_wrong_field_is_refused(change):
    with pytest.raises(UnsupportedConfigError):
        LayerPlan.from_json(PLAN.to_json() | change)


def test_why_not_names_the_kernel_at_fault():
    plan = replace(PLAN, down=replace(PLAN.down, split_k=2))
    assert (plan.why_not(TARGETS["sm_90"], SHAPE) or "").startswith("down: ")
    assert PLAN.why_not(TARGETS["sm_90"], SHAPE) is None
    assert plan.config(Role.GATE_UP) is PLAN.gate_up
