from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import median, quantiles

import pytest

from moetune.engine.decide import Finalist, noise_us, ranking
from moetune.outcome import Figure, Measured, Source
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.plan import LayerPlan

NONE = Figure.unavailable("not measured here")


def plan(block_n, structure=Structure.GATHER, stages=3):
    config = MoEKernelConfig(structure=structure, block_m=16, block_n=block_n, block_k=64, prefetch_distance=stages)
    return LayerPlan(gate_up=config, down=config)


def timed(the_plan, median_us, spread_us=0.1, samples=20, source=Source.EVENT):
    outcome = Measured(
        median_us=median_us,
        spread_us=spread_us,
        samples=samples,
        flops_per_byte=NONE,
        bandwidth_gbps=NONE,
        issue_efficiency=NONE,
        source=source,
    )
    return Finalist(the_plan, outcome)


def noisy(the_plan, samples):
    fifths = quantiles(samples, n=5)
    return timed(the_plan, median(samples), (fifths[3] - fifths[0]) / 2, len(samples))


@pytest.mark.parametrize("seed", range(20))
def test_timing_noise_neither_dethrones_the_default_nor_crowns_an_outlier(seed):
    draw = Random(seed)
    default = plan(256)
    finalists = [
        noisy(plan(32), [draw.gauss(100.0, 3.0) for _ in range(20)]),
        noisy(plan(64), [draw.gauss(100.4, 3.0) for _ in range(20)]),
        noisy(plan(128), [60.0, *(draw.gauss(103.0, 0.3) for _ in range(19))]),
        noisy(default, [draw.gauss(100.2, 0.3) for _ in range(20)]),
    ]
    assert ranking(finalists, finalists[-1])[0].plan == default


def test_what_beats_the_default_by_more_than_noise_is_adopted():
    default, better = timed(plan(32), 100.0), timed(plan(64), 98.0)
    assert [finalist.plan for finalist in ranking([default, better], default)] == [better.plan, default.plan]


def test_a_gain_under_half_a_percent_is_not_adopted_however_quiet_the_clock():
    default, better = timed(plan(32), 100.0, 0.0), timed(plan(64), 99.6, 0.0)
    assert ranking([default, better], default)[0] == default


def test_equals_are_ordered_by_rule_and_not_by_the_last_digit():
    default = timed(plan(32), 110.0)
    one, two = timed(plan(64, Structure.TMA), 99.9), timed(plan(64), 100.1)
    assert ranking([default, one, two], default)[0] == two  # pointer loads before descriptors
    assert (
        ranking([default, one, two], default, preferred=[one.plan])[0] == one
    )  # the neighbouring count's winner first


def test_equals_end_at_one_percent_however_wide_the_noise():
    default = timed(plan(32), 200.0, 5.0)
    one, two = timed(plan(64, Structure.TMA), 100.0, 5.0, 6), timed(plan(64), 101.5, 5.0, 6)
    assert ranking([default, one, two], default)[0] == one


def test_without_a_default_the_fastest_wins():
    slow, fast = timed(plan(32), 120.0), timed(plan(64), 100.0)
    assert ranking([slow, fast], None) == [fast, slow]


def test_a_sum_of_kernels_needs_three_percent_to_beat_a_measured_layer():
    default = timed(plan(32), 100.0)
    close, far = timed(plan(64), 98.0, source=Source.COMPOSED), timed(plan(64), 96.0, source=Source.COMPOSED)
    assert ranking([default, close], default)[0] == default
    assert ranking([default, far], default)[0] == far


def test_more_samples_tell_smaller_differences_apart():
    few, many = (
        noise_us(timed(plan(32), 100.0, 2.0, n).measured, timed(plan(64), 100.0, 2.0, n).measured) for n in (6, 40)
    )
    assert few > many >= 0.5


def test_every_finalist_stays_in_the_order_so_that_a_wrong_winner_has_a_successor():
    finalists = [timed(plan(width), 100.0 + width) for width in (16, 32, 64, 128)]
    found = ranking(finalists, finalists[2])
    assert sorted(finalist.plan.text for finalist in found) == sorted(finalist.plan.text for finalist in finalists)
    assert replace(found[0].plan) == plan(16)
