"""Limits after the compiler: its report decides, and nothing wrong is taken over from a sweep that had others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moetune.errors import UsageError
from moetune.outcome import Compiled, Failed, FailureKind, Figure, Measured, Stage, Subject, Trial
from moetune.space import FREE, Limits, SpaceFile, candidates, recorded_space, require_something
from moetune.space.axes import Axes
from moetune.space.limits import Allowed
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

H200 = TARGETS["sm_90"]
SHAPE = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=64, block_n=64, block_k=64)
CEILING_FILE = SpaceFile(name="s.json", allowed=dict.fromkeys(Role, Allowed(axes=Axes({}, 65_536))))
NONE = Figure.unavailable("not measured here")


def report(registers=100, smem_bytes=65_536):
    return Compiled(registers=registers, spills=0, smem_bytes=smem_bytes, block_size=128)


@pytest.mark.parametrize(
    ("limits", "config", "compiled", "said"),
    [
        (FREE, CONFIG, None, None),
        (Limits(max_smem=65_536), CONFIG, report(), None),
        (Limits(max_smem=65_535), CONFIG, report(), "over --max-smem 65535"),
        (Limits(max_smem=65_536), CONFIG, None, "never compiled, so nothing shows what it takes"),
        (Limits(max_registers=100), CONFIG, report(), None),
        (Limits(max_registers=99), CONFIG, report(), "over --max-registers 99"),
        (Limits(max_registers=128), replace(CONFIG, max_registers=168), report(), "over --max-registers 128"),
        (Limits(max_registers=128), CONFIG, None, "never compiled, so nothing shows what it takes"),
        (Limits(structures=(Structure.TMA,)), CONFIG, report(), "outside --structures tma"),
        (Limits(structures=(Structure.GATHER,)), CONFIG, None, None),
        (Limits(file=CEILING_FILE), CONFIG, report(smem_bytes=65_537), "over the smem_size of --space s.json"),
        (Limits(file=CEILING_FILE), CONFIG, report(), None),
    ],
)
def test_the_compilers_report_decides(limits, config, compiled, said):
    assert limits.why_not_compiled(config, Role.DOWN, compiled) == said


def trial(outcome, compiled, config=CONFIG):
    return Trial(
        subject=Subject.DOWN,
        tokens=16,
        choice=config,
        stage=Stage.SCREEN,
        outcome=outcome,
        compiled=compiled,
        verified=True,
    )


RAN = Measured(median_us=9.0, spread_us=0.1, samples=9, flops_per_byte=NONE, bandwidth_gbps=NONE, issue_efficiency=NONE)
SLOW = Failed(FailureKind.SLOW, "its first launch took 9 us, over 2.5 times the best so far")


@pytest.mark.parametrize(
    ("limits", "earlier", "reused"),
    [
        (FREE, trial(SLOW, report()), True),
        (Limits(structures=(Structure.GATHER,)), trial(RAN, report()), True),
        (Limits(structures=(Structure.GATHER,)), trial(SLOW, report()), False),
        (Limits(structures=(Structure.TMA,)), trial(RAN, report()), False),
        (Limits(max_registers=99), trial(RAN, report()), False),
        (Limits(max_registers=100), trial(RAN, report()), True),
        (Limits(max_smem=70_000), trial(RAN, None), False),
        (Limits(max_smem=70_000), trial(Failed(FailureKind.COMPILE, "refused"), None), True),
    ],
)
def test_a_screening_is_reused_where_it_holds_under_these_limits(limits, earlier, reused):
    assert limits.reuses(earlier) is reused


def test_a_table_s_entry_is_kept_only_where_it_shows_that_it_keeps_the_limits():
    capped = replace(CONFIG, max_registers=128, smem_size=65_536)
    plan = LayerPlan(gate_up=capped, down=capped)
    assert Limits(max_smem=65_536, max_registers=128, structures=(Structure.GATHER,)).keep(plan)
    assert not Limits(max_smem=65_535).keep(plan)
    assert not Limits(max_registers=127).keep(plan)
    assert not Limits(max_registers=128).keep(replace(plan, down=replace(capped, max_registers=None)))
    assert not Limits(structures=(Structure.GATHER,)).keep(replace(plan, down=replace(capped, structure=Structure.TMA)))


def test_a_recording_is_filtered_and_says_by_what():
    other = replace(CONFIG, structure=Structure.TMA)
    limits = Limits(structures=(Structure.TMA,))
    space = recorded_space(SHAPE, H200, Role.DOWN, (64,), (CONFIG, other), limits)
    assert (space.configs, space.legal) == ((other,), 1)
    assert space.outside == {"outside --structures tma": 1}
    assert space.neighbours(other, 64) == []


def spaces(limits, tokens):
    return {role: candidates(SHAPE, H200, role, tokens, limit=10, limits=limits) for role in Role}


@pytest.mark.parametrize(
    ("limits", "tokens", "said"),
    [
        (Limits(max_smem=1000), (16,), r"no config is left for gate_up: over --max-smem 1000: [\d,]+ removed"),
        (
            Limits(structures=(Structure.TMA_PERMUTE,)),
            (16,),
            "no config is left for down: outside --structures tma_perm",
        ),
        (
            Limits(file=SpaceFile(name="s.json", allowed={Role.DOWN: Allowed(axes=Axes({"block_m": (16,)}))})),
            (16, 4096, 8192),
            r"left at 4096, 8192 tokens: .*out of 64, 128, 256 at 4096, and gate_up keeps .* and down keeps 16; .*widen",
        ),
    ],
)
def test_limits_that_leave_nothing_are_refused_with_what_removed_how_many(limits, tokens, said):
    with pytest.raises(UsageError, match=said):
        require_something(spaces(limits, tokens), tokens)


def test_heights_that_the_gemms_do_not_share_are_refused():
    named = {Role.GATE_UP: (16,), Role.DOWN: (64,)}
    file = SpaceFile(
        name="s.json", allowed={role: Allowed(axes=Axes({"block_m": heights})) for role, heights in named.items()}
    )
    with pytest.raises(UsageError, match="gate_up keeps 16 and down keeps 64"):
        require_something(spaces(Limits(file=file), (16,)), (16,))


def test_limits_that_leave_something_are_none_of_an_error():
    require_something(spaces(Limits(max_smem=98_304), (16, 4096)), (16, 4096))
    require_something(spaces(FREE, (16,)), (16,))
