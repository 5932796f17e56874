"""What every search must do, whatever its idea."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moetune.outcome import Failed, FailureKind, Figure, Measured
from moetune.strategies import STRATEGIES, RandomOrder, Staged, Terrain
from moetune_kernels.config import MoEKernelConfig, Structure

NONE = Figure.unavailable("not measured here")
BASE = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
COARSE = tuple(
    replace(BASE, block_n=block_n, num_warps=num_warps) for block_n in (32, 64, 128) for num_warps in (2, 4, 8)
)
REACHABLE = {replace(config, prefetch_distance=stages) for config in COARSE for stages in (2, 3, 4, 5)}
EVERY_STRATEGY = pytest.mark.parametrize("name", STRATEGIES)


def neighbours(config):
    stages = (config.prefetch_distance - 1, config.prefetch_distance + 1)
    return [replace(config, prefetch_distance=other) for other in stages if 2 <= other <= 5]


def terrain(polish=12):
    return Terrain(coarse=COARSE, neighbours=neighbours, polish=polish)


def outcome_of(config):
    if config.num_warps == 8:
        return Failed(FailureKind.SLOW, "out of the race")
    time_us = 100.0 + abs(config.block_n - 64) + config.num_warps - 5 * config.prefetch_distance
    return Measured(
        median_us=time_us, spread_us=1.0, samples=3, flops_per_byte=NONE, bandwidth_gbps=NONE, issue_efficiency=NONE
    )


def play(strategy, batch=4, answer=outcome_of):
    asked = []
    for _ in range(1000):
        configs = strategy.ask(batch)
        assert len(configs) <= batch
        if not configs:
            return asked
        asked += configs
        for config in configs:
            strategy.tell(config, answer(config))
    pytest.fail("the search does not end")


@EVERY_STRATEGY
@pytest.mark.parametrize("batch", [1, 4, 100])
def test_it_asks_no_config_twice_stays_in_its_terrain_and_ends(name, batch):
    asked = play(STRATEGIES[name](terrain(), 0), batch)
    assert len(set(asked)) == len(asked)
    assert set(COARSE) <= set(asked) <= REACHABLE


@EVERY_STRATEGY
def test_the_same_seed_asks_in_the_same_order(name):
    first, second = (play(STRATEGIES[name](terrain(), 7)) for _ in range(2))
    assert first == second


@EVERY_STRATEGY
def test_it_survives_when_everything_fails(name):
    asked = play(STRATEGIES[name](terrain(), 0), answer=lambda _: Failed(FailureKind.COMPILE, "refused"))
    assert set(asked) == set(COARSE)


@EVERY_STRATEGY
def test_asking_for_nothing_gives_nothing_and_loses_nothing(name):
    strategy = STRATEGIES[name](terrain(), 0)
    assert list(strategy.ask(0)) == []
    assert set(COARSE) <= set(play(strategy))


@EVERY_STRATEGY
def test_an_empty_terrain_is_over_at_once(name):
    strategy = STRATEGIES[name](Terrain(coarse=(), neighbours=neighbours, polish=5), 0)
    assert list(strategy.ask(8)) == []


@EVERY_STRATEGY
def test_no_more_than_the_polish_is_asked_beyond_the_compiled_configs(name):
    asked = play(STRATEGIES[name](terrain(polish=3), 0))
    assert len(set(asked) - set(COARSE)) <= 3


def test_the_staged_search_follows_the_best_until_its_neighbours_are_no_better():
    asked = play(Staged(terrain(polish=20)))
    assert replace(BASE, block_n=64, num_warps=2, prefetch_distance=5) in asked  # two steps from where it began
    assert asked[: len(COARSE)] == list(COARSE)


def test_the_staged_search_does_not_polish_while_coarse_answers_are_missing():
    strategy = Staged(terrain())
    first = strategy.ask(len(COARSE))
    for config in first[:-1]:
        strategy.tell(config, outcome_of(config))
    assert list(strategy.ask(4)) == []
    strategy.tell(first[-1], outcome_of(first[-1]))
    assert len(strategy.ask(4)) > 0


def test_the_polish_is_spent_in_rounds_so_that_the_second_starts_from_what_the_first_found():
    strategy = Staged(terrain(polish=12))
    for config in strategy.ask(len(COARSE)):
        strategy.tell(config, outcome_of(config))
    first = strategy.ask(100)
    assert 0 < len(first) <= 6
    assert list(strategy.ask(100)) == []  # until these ended
    for config in first:
        strategy.tell(config, outcome_of(config))
    second = strategy.ask(100)
    best = min((*COARSE, *first), key=lambda config: getattr(outcome_of(config), "median_us", float("inf")))
    assert set(second) & set(neighbours(best))


def test_another_seed_gives_another_random_order():
    assert play(RandomOrder(terrain(), 1)) != play(RandomOrder(terrain(), 2))
