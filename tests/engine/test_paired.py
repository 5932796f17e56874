from __future__ import annotations

from math import log1p
from random import Random

import pytest

from moetune.engine.paired import CONFIDENCE, gap


def rounds(draw, ratio, count, sigma=0.005):
    """Two plans under one drifting clock: both slow down by up to 5%, each is also disturbed by itself."""
    one, other = [], []
    for place in range(count):
        clock = 100.0 * (1.0 + 0.05 * place / count)
        one.append(clock * ratio * (1.0 + draw.gauss(0.0, sigma)))
        other.append(clock * (1.0 + draw.gauss(0.0, sigma)))
    return one, other


@pytest.mark.parametrize("count", [10, 16, 33, 64, 120])
def test_the_bounds_hold_the_true_difference_as_often_as_they_say(count):
    """Also where noise is skewed: each time of twenty is 10% long."""
    draw, held, trials = Random(count), 0, 2000
    for _ in range(trials):
        ratios = [1.02 * (1.1 if draw.random() < 0.05 else 1.0) * (1.0 + draw.gauss(0, 0.004)) for _ in range(count)]
        found = gap(ratios, [1.0] * count)
        held += found.low <= log1p(0.02) + 0.0003 and found.high >= log1p(0.02) - 0.0003
    assert held / trials >= CONFIDENCE - 0.005


def test_the_bounds_are_as_narrow_as_that_allows():
    draw = Random(1)
    widths = [found.high - found.low for found in (gap(*rounds(draw, 1.0, count)) for count in (16, 64, 120))]
    assert widths[0] > widths[1] > widths[2]
    assert widths[2] < 0.006  # 0.7% of noise in a ratio, 120 rounds


@pytest.mark.parametrize("count", [0, 1, 8, 9])
def test_too_few_rounds_have_no_bounds(count):
    assert gap([1.0] * count, [2.0] * count) is None


def test_a_common_drift_is_no_difference_and_one_outlier_widens_nothing():
    draw = Random(2)
    one, other = rounds(draw, 1.0, 64)
    assert not gap(one, other).is_separated
    steady, spiked = [100.0 + place / 100 for place in range(16)], [101.0 + place / 100 for place in range(16)]
    before = gap(spiked, steady)
    spiked[3] *= 5
    after = gap(spiked, steady)
    assert before.is_separated
    assert after.is_separated
    assert after.high < 0.02


def test_rounds_are_paired_from_the_first_where_one_has_more():
    assert gap([2.0] * 20 + [9.0] * 20, [1.0] * 20) == gap([2.0] * 20, [1.0] * 20)


def test_what_is_surely_under_the_noise_is_settled_and_what_is_near_it_is_open():
    near_nothing = gap([100.0, 100.1] * 32, [100.1, 100.0] * 32)
    assert near_nothing.is_under(0.005)
    assert near_nothing.is_settled(0.005)
    assert not near_nothing.is_settled(0.0)
    wide = gap([99.0, 101.0] * 8, [100.0] * 16)
    assert not wide.is_settled(0.005)
    slower = gap([101.0] * 16, [100.0] * 16)
    assert (slower.is_separated, slower.is_under(0.005), slower.is_under(0.02)) == (True, False, True)
    assert slower.percent == pytest.approx(1.0)
