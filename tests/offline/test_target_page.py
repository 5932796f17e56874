"""The page of a device that is not here, compiler included."""

from __future__ import annotations

import pytest

from moetune.outcome import Source
from moetune.profiling import ProfileRequest, profile
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=512, inter=256, local_experts=8, top_k=2)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_the_page_carries_what_the_compiler_says(target):
    page = profile(ProfileRequest(shape=SHAPE, tokens=(16,), target=target))
    assert not [note for note in page.notes if "compile" in note]
    gemms = [kernel for kernel in page.tokens[0].kernels if kernel.choice]
    assert len(gemms) == 2
    for kernel in gemms:
        assert kernel.registers > 0
        assert kernel.spills == 0
        assert kernel.figures.waves.source is Source.STATIC
    if target != "gfx942":  # no disassembler for AMD: no instruction count
        assert any(kernel.figures.issue_ceiling.source is Source.STATIC for kernel in gemms)
