"""Counted bytes against the least bytes: each cause of a difference is named."""

from __future__ import annotations

import pytest

from moetune.measure.parts import Part
from moetune.models.roofline import Work
from moetune.profiling.traffic import Traffic, explain_bytes

MB = 1_000_000


def traffic(read, written, *, weights=900 * MB, rows_in=50 * MB, out=50 * MB, blocks=1.0, part=Part.GATE_UP):
    work = Work(flops=0.0, weight_bytes=weights, activation_bytes=rows_in + out, touched_experts=8.0)
    return Traffic(
        part=part, read=read, written=written, work=work, output_bytes=out, l2_bytes=60 << 20, blocks_per_expert=blocks
    )


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (traffic(955 * MB, 48 * MB), None),
        (traffic(90 * MB, 0, weights=0, out=100 * MB, rows_in=90 * MB, part=Part.COMBINE), "100.0 MB of the result"),
        (traffic(500 * MB, 50 * MB), "fewer experts"),
        (traffic(2750 * MB, 50 * MB, blocks=8.0), "read 3.0 times"),
        (traffic(1400 * MB, 50 * MB), "gathered once per column tile"),
        (traffic(950 * MB, 400 * MB), "350.0 MB more written"),
        (traffic(0.4 * MB, 0, weights=0, rows_in=1000, out=1000, part=Part.ROUTING), "index tables"),
        (traffic(0, 0, weights=0, rows_in=0, out=0), None),
    ],
    ids=["agrees", "whole-result-in-l2", "less", "weights-again", "rows-again", "writes", "tiny", "none"],
)  # fmt: skip
def test_the_difference_is_explained(made, says):
    found = explain_bytes(made)
    if says is None:
        assert found is None
    else:
        assert found is not None
        assert says in found
