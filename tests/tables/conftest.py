"""A made-up table, and a lookup that forgets between tests."""

from __future__ import annotations

import pytest

from moetune_kernels import lookup
from moetune_kernels.device import TARGETS
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.kernel_hash import source_sha256
from moetune_kernels.shape import MoEShape
from moetune_kernels.table import Entry, TunedTable, serve_ranges

SHAPE = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)


@pytest.fixture
def make_table():
    """Return a maker of sound tables for the H200."""

    def make(tokens=(1, 2, 4, 8, 16, 1000), *, shape=SHAPE, device=TARGETS["sm_90"], backend="cuda") -> TunedTable:
        figures = {
            "flops_per_byte": {"value": 16.0, "source": "analytical"},
            "bandwidth_gbps": {"value": 4120.0, "source": "counter"},
            "issue_efficiency": {"value": None, "source": "unavailable", "reason": "counters need root here"},
        }
        entries = {
            count: Entry(
                tokens=count, serves=serves, plan=heuristic_plan(shape, count, device), median_us=90.0, spread_us=1.0,
                baseline_us=100.0, bound_us=50.0, **figures,
            )
            for count, serves in serve_ranges(tokens).items()
        }  # fmt: skip
        plans = [entry.plan for entry in entries.values()]
        return TunedTable(
            backend=backend, device=device, shape=shape, ceilings={"bytes_per_s": 4e12, "flops": 7e14},
            kernels={"version": "0.1.0", "source_sha256": source_sha256(plans)}, triton="3.6.0", torch="2.11.0",
            driver=None, measured_at="2026-12-01T00:00:00Z", command="moetune sweep --model mixtral-8x7b", entries=entries,
        )  # fmt: skip

    return make


@pytest.fixture(autouse=True)
def _fresh_lookup():
    lookup.reload()
    yield
    lookup.reload()
