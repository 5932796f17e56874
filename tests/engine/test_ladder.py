"""Between two entries: the faster neighbour serves, and what that loses is measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from moetune.engine.bench import Bench
from moetune.engine.entries import with_ranges, with_switch
from moetune.engine.ladder import Ladder, Probe, gaps
from moetune.outcome import Failed, FailureKind, Figure, Measured
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.plan import LayerPlan
from moetune_kernels.table import Entry

BASE = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
NONE = Figure.unavailable("not measured here")


def plan(block_n):
    config = replace(BASE, block_n=block_n)
    return LayerPlan(gate_up=config, down=config)


DEFAULT, SMALL, MIDDLE, LARGE, FAR = plan(16), plan(32), plan(64), plan(128), plan(256)


def entry(tokens, the_plan):
    figures = dict.fromkeys(("flops_per_byte", "bandwidth_gbps", "issue_efficiency"), NONE.to_json())
    times = {"median_us": 10.0, "spread_us": 0.1, "baseline_us": 11.0, "bound_us": 9.0}
    return Entry(tokens=tokens, serves=(tokens, tokens), plan=the_plan, **times, **figures)


ENTRIES = {1: entry(1, FAR), 16: entry(16, SMALL), 64: entry(64, LARGE), 256: entry(256, MIDDLE)}


def measured(median_us):
    return Measured(
        median_us=median_us, spread_us=0.1, samples=10, flops_per_byte=NONE, bandwidth_gbps=NONE, issue_efficiency=NONE
    )


def probe(fake_backend, times_us, gap=(16, 32, 64)):
    asked = []

    def layer(the_plan, rounds, tokens):
        asked.append((the_plan, tokens))
        outcome = times_us[the_plan]
        return outcome if isinstance(outcome, Failed) else measured(outcome)

    backend = fake_backend(layer=layer)
    bench = Bench(backend, backend.journal, lambda _: None)
    return Ladder(bench=bench, default_plan=lambda tokens: DEFAULT).probe(gap, ENTRIES), asked


def test_every_plan_near_the_gap_and_the_default_are_timed_in_it(fake_backend):
    found, asked = probe(fake_backend, {SMALL: 20.0, LARGE: 22.0, MIDDLE: 30.0, DEFAULT: 25.0})
    assert {the_plan for the_plan, _ in asked} == {SMALL, LARGE, MIDDLE, DEFAULT}  # 1 token is 32 times away
    assert {tokens for _, tokens in asked} == {32}
    assert not found.upper_serves
    assert found.loss == 0.0
    assert found.best == SMALL


@pytest.mark.parametrize(
    ("times", "upper_serves", "loss", "last_of_lower"),
    [
        ({SMALL: 20.0, LARGE: 22.0, MIDDLE: 30.0, DEFAULT: 25.0}, False, 0.0, 45),
        ({SMALL: 22.0, LARGE: 20.0, MIDDLE: 30.0, DEFAULT: 25.0}, True, 0.0, 22),
        ({SMALL: 22.0, LARGE: 21.0, MIDDLE: 30.0, DEFAULT: 20.0}, True, 0.05, 22),
        ({SMALL: 20.0, LARGE: 20.0, MIDDLE: 16.0, DEFAULT: 25.0}, False, 0.25, 45),
    ],
)
def test_the_faster_neighbour_serves_and_loses_what_a_third_plan_would_gain(
    fake_backend, times, upper_serves, loss, last_of_lower
):
    found, _ = probe(fake_backend, times)
    assert found.upper_serves is upper_serves
    assert found.loss == pytest.approx(loss)
    assert found.last_of_lower == last_of_lower


def test_a_neighbours_plan_that_fails_there_does_not_serve(fake_backend):
    fault = Failed(FailureKind.LAUNCH, "misaligned address")
    found, _ = probe(fake_backend, {SMALL: fault, LARGE: 22.0, MIDDLE: 30.0, DEFAULT: 20.0})
    assert found.upper_serves
    assert found.loss == pytest.approx(0.1)
    found, _ = probe(fake_backend, {SMALL: fault, LARGE: fault, MIDDLE: 30.0, DEFAULT: 20.0})
    assert found.loss is None
    assert found.best == DEFAULT


def test_a_count_that_cannot_be_opened_is_no_probe(fake_backend):
    full = Failed(FailureKind.RESOURCES, "needs 200 GiB")
    backend = fake_backend(open=lambda tokens: full)
    bench = Bench(backend, backend.journal, lambda _: None)
    assert Ladder(bench=bench, default_plan=lambda tokens: DEFAULT).probe((16, 32, 64), ENTRIES) == full


def test_gaps_lie_strictly_between_neighbours_and_the_widest_comes_first():
    assert gaps({}) == gaps({5: 0}) == gaps({1: 0, 2: 0}) == []
    found = gaps(dict.fromkeys((1, 2, 4, 8, 16, 24, 8192, 16384)))
    assert found[0] == (24, 443, 8192)
    assert all(low < between < high for low, between, high in found)
    assert len(found) == 6


def test_a_measured_switch_point_outlives_later_writes_and_gives_way_to_an_entry_between():
    ranged = with_ranges(ENTRIES)
    assert ranged[16].serves == (5, 32)
    found = Probe(tokens=32, lower=16, upper=64, times_us={SMALL: 2.0, LARGE: 1.0}, lower_plan=SMALL, upper_plan=LARGE)
    switched = with_switch(ranged, found.lower, found.upper, found.last_of_lower)
    assert (switched[16].serves, switched[64].serves) == ((5, 22), (23, 128))
    again = with_ranges(switched)
    assert again == switched
    between = with_ranges(switched | {32: entry(32, MIDDLE)})
    assert (between[16].serves, between[32].serves, between[64].serves) == ((5, 22), (23, 45), (46, 128))
    assert all(low.serves[1] + 1 == high.serves[0] for low, high in pairwise(between.values()))


def test_entries_of_two_tables_meet_at_the_geometric_mean_even_where_their_ranges_touch():
    old, new = with_ranges({8: entry(8, SMALL), 16: entry(16, SMALL)}), with_ranges({12: entry(12, LARGE)})
    assert old[8].serves[1] + 1 == new[12].serves[0]
    assert with_ranges(old | new)[8].serves == (8, 9)


@pytest.mark.parametrize("last", [15, 64])
def test_a_switch_point_stays_between_its_entries(last):
    with pytest.raises(ValueError, match=r"from 16 to 63"):
        with_switch(with_ranges(ENTRIES), 16, 64, last)
