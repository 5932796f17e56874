"""Table entries from verdicts: figures, ranges, and the shared memory that the compiler reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from moetune.engine.backend import LayerFigures
from moetune.engine.finals import Verdict
from moetune.outcome import Compiled
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.plan import LayerPlan
from moetune_kernels.table import Entry, serve_ranges

CompiledKernels = Mapping[tuple[Role, MoEKernelConfig], Compiled]


def entry_of(tokens: int, verdict: Verdict, bound_us: float, compiled: CompiledKernels) -> Entry:
    """Return the entry of one token count; its range is that of a table with no other entry."""
    measured = verdict.winner.measured
    return Entry(
        tokens=tokens,
        serves=(tokens, tokens),
        plan=with_smem(verdict.winner.plan, compiled),
        median_us=_rounded(measured.median_us),
        spread_us=_rounded(measured.spread_us),
        baseline_us=None if verdict.baseline_us is None else _rounded(verdict.baseline_us),
        bound_us=_rounded(bound_us),
        flops_per_byte=measured.flops_per_byte.to_json(),
        bandwidth_gbps=measured.bandwidth_gbps.to_json(),
        issue_efficiency=measured.issue_efficiency.to_json(),
    )


def with_figures(entry: Entry, figures: LayerFigures) -> Entry:
    """Return the entry with figures from hardware counters."""
    return replace(
        entry,
        flops_per_byte=figures.flops_per_byte.to_json(),
        bandwidth_gbps=figures.bandwidth_gbps.to_json(),
        issue_efficiency=figures.issue_efficiency.to_json(),
    )


def with_ranges(entries: Mapping[int, Entry]) -> dict[int, Entry]:
    """Return the entries with the ranges that they serve beside each other.

    Neighbours whose ranges meet keep the switch point between them, which may have been measured; others meet at the
    geometric mean.
    """
    ladder = sorted(entries)
    usual = serve_ranges(entries)
    tops = {tokens: usual[tokens][1] for tokens in ladder}
    for lower, upper in pairwise(ladder):
        last = entries[lower].serves[1]
        if last + 1 == entries[upper].serves[0] < upper:  # one that begins at its own count was the first of its table
            tops[lower] = last
    bottoms = dict(zip(ladder[1:], (tops[tokens] + 1 for tokens in ladder), strict=False))
    return {
        tokens: replace(entries[tokens], serves=(bottoms.get(tokens, usual[tokens][0]), tops[tokens]))
        for tokens in ladder
    }


def with_switch(entries: Mapping[int, Entry], lower: int, upper: int, last: int) -> dict[int, Entry]:
    """Return the entries with ``last`` as the last token count that entry ``lower`` serves before its neighbour does.

    Raises:
        ValueError: the switch point is not between the two.
    """
    if not lower <= last < upper:
        raise ValueError(f"entry {lower} serves from {lower} to {upper - 1} tokens beside entry {upper}, got {last}")
    first = entries[lower].serves[0]
    end = entries[upper].serves[1]
    changed = {
        lower: replace(entries[lower], serves=(first, last)),
        upper: replace(entries[upper], serves=(last + 1, end)),
    }
    return dict(entries) | changed


def with_smem(plan: LayerPlan, compiled: CompiledKernels) -> LayerPlan:
    """Return the plan with each kernel's ``smem_size`` set to what the compiler reported, where it did."""
    return replace(plan, gate_up=_capped(plan, Role.GATE_UP, compiled), down=_capped(plan, Role.DOWN, compiled))


def _capped(plan: LayerPlan, role: Role, compiled: CompiledKernels) -> MoEKernelConfig:
    config = plan.config(role)
    report = compiled.get((role, config))
    return config if report is None or report.smem_bytes < 1 else config.with_smem(report.smem_bytes)


def _rounded(time_us: float) -> float:
    return round(time_us, 3)
