"""The page of a device that is not here: every target, every source analytical or static, never called measured."""

from __future__ import annotations

import json

import pytest

import moetune
from moetune.errors import UsageError
from moetune.models.roofline import kernel_work, layer_work, nominal_peaks
from moetune.outcome import Compiled, Source
from moetune.profiling import PlanChoice, ProfileRequest, profile, target
from moetune.profiling.analytical import blocks_per_sm
from moetune.profiling.plans import choose_plans
from moetune.profiling.terminal import as_text
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape, WeightFormat


@pytest.fixture
def uncompiled(monkeypatch):
    """Leave the compiler out: these pages are about formulas."""
    monkeypatch.setattr(target, "_compile", lambda *_: ({}, None))


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_a_page_that_never_claims_a_measurement(name, uncompiled):
    made = profile(ProfileRequest(target=name))
    assert made.measured is False
    assert made.device == TARGETS[name]
    json.dumps(made.to_json(), allow_nan=False)
    text = as_text(made)
    assert "nothing on this page was measured" in text
    assert max(map(len, text.splitlines())) <= 80
    for token_profile in made.tokens:
        assert token_profile.layer_time_us.value is None
        for kernel in token_profile.kernels:
            sources = {value["source"] for value in kernel.figures.to_json().values()}
            assert sources <= {"analytical", "static", "unavailable"}
            assert kernel.figures.time_us.value is None


def test_bounds_and_bytes_are_the_rooflines(uncompiled):
    (one, _, many) = profile(ProfileRequest(target="sm_90")).tokens
    shape, peaks = ProfileRequest().shape, nominal_peaks(TARGETS["sm_90"])
    assert one.bound_us.value == pytest.approx(layer_work(shape, 1).bytes_min / peaks.bytes_per_s * 1e6)
    gate_up = next(kernel for kernel in many.kernels if kernel.part.value == "gate_up")
    work = kernel_work(shape, 4096, Role.GATE_UP)
    assert gate_up.figures.min_bytes.value == pytest.approx(work.bytes_min)
    assert gate_up.figures.flops_per_byte.value == pytest.approx(work.flops / work.bytes_min)
    assert one.touched_experts == pytest.approx(2.0)


def test_without_a_gpu_the_command_as_written_shows_a_page_and_says_whose(uncompiled, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = moetune.profile_moe_kernel(hidden_dim=4096, expert_dim=14336, num_experts=64, top_k=2)
    assert made.measured is False
    assert "no GPU here" in made.notes[0]
    assert "NVIDIA H200" in made.notes[0]


def test_a_compiler_that_fails_leaves_a_poorer_page_that_says_so(monkeypatch):
    from moetune.measure import offline

    def broken(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(offline, "compile_offline", broken)
    made = profile(ProfileRequest(target="sm_90", tokens=(1,)))
    assert any("no space left" in note for note in made.notes)
    assert made.tokens[0].kernels[1].figures.waves.source is Source.ANALYTICAL


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": ()}, "at least one"),
        ({"tokens": (0,)}, "1 to 131072"),
        ({"tokens": (True,)}, "whole numbers"),
        ({"tokens": (1 << 20,)}, "131072"),
        ({"target": "sm_91"}, "sm_90"),
        ({"shape": MoEShape(hidden=64, inter=64, local_experts=4, top_k=2, format=WeightFormat.FP8)}, "fp8"),
    ],
    ids=["none", "zero", "bool", "many", "target", "format"],
)
def test_a_request_that_cannot_be_answered_is_one_sentence(changes, says):
    with pytest.raises(UsageError, match=says):
        ProfileRequest(**changes)


def test_duplicate_token_counts_are_profiled_once_in_the_order_given():
    assert ProfileRequest(tokens=(64, 1, 64)).tokens == (64, 1)


def test_the_command_on_the_page_makes_the_page_again():
    command = ProfileRequest(target="sm_80", tokens=(1, 8)).command
    assert command == ("moetune profile --hidden 4096 --inter 14336 --experts 64 --top-k 2 --tokens 1,8 --target sm_80")


def test_a_plan_of_ones_own_is_checked_against_the_device():
    config = MoEKernelConfig(structure=Structure.TMA, block_m=64, block_n=64, block_k=64)
    plan = LayerPlan(gate_up=config, down=config)
    with pytest.raises(UsageError, match=r"9\.0"):
        choose_plans(ProfileRequest(plan_choice=plan), TARGETS["sm_80"])
    assert choose_plans(ProfileRequest(plan_choice=plan), TARGETS["sm_90"])[0].plan == plan


def test_the_default_plan_can_be_asked_for():
    chosen = choose_plans(ProfileRequest(plan_choice=PlanChoice.DEFAULT), TARGETS["sm_90"])
    assert [one.tuned for one in chosen] == [False] * 3


@pytest.mark.parametrize(
    ("compiled", "blocks"),
    [
        (Compiled(registers=32, spills=0, smem_bytes=0, block_size=1024), 2),
        (Compiled(registers=255, spills=0, smem_bytes=0, block_size=256), 1),
        (Compiled(registers=32, spills=0, smem_bytes=100_000, block_size=128), 2),
        (Compiled(registers=32, spills=0, smem_bytes=232_448, block_size=128), 1),
        (Compiled(registers=16, spills=0, smem_bytes=0, block_size=32), 32),
    ],
    ids=["threads", "registers", "shared-memory", "all-shared-memory", "block-limit"],
)
def test_blocks_per_sm_follow_the_scarcest_resource(compiled, blocks):
    assert blocks_per_sm(TARGETS["sm_90"], compiled) == blocks
