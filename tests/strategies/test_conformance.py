"""What every search must do, whatever its idea."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moetune.outcome import Failed, FailureKind, Figure, Measured
from moetune.space.prior import Problem, predict
from moetune.strategies import DEFAULT_STRATEGY, STRATEGIES, RandomOrder, Terrain, TrialLog
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.shape import MoEShape

PROBLEM = Problem(MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8), TARGETS["sm_90"], Role.DOWN)
NONE = Figure.unavailable("not measured here")
BASE = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
COMPILED = tuple(
    replace(BASE, block_n=block_n, num_warps=num_warps) for block_n in (32, 64, 128) for num_warps in (2, 4, 8)
)
RESERVE = tuple(replace(config, block_k=128) for config in COMPILED)
STAGES = (2, 3, 4, 5)
REACHABLE = {replace(config, prefetch_distance=stages) for config in (*COMPILED, *RESERVE) for stages in STAGES}
CRASH = Failed(FailureKind.LAUNCH, "an illegal memory access was encountered")
EVERY_STRATEGY = pytest.mark.parametrize("name", STRATEGIES)
LIMITED = pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "exhaustive"])


def neighbours(config):
    stages = (config.prefetch_distance - 1, config.prefetch_distance + 1)
    return [replace(config, prefetch_distance=other) for other in stages if other in STAGES]


def guess(config, tokens):
    return predict(config, PROBLEM, tokens)


def terrain(**changed):
    usual = {"compiled": COMPILED, "reserve": RESERVE, "kernels": 6, "trials": 20, "log": TrialLog()}
    return Terrain(problem=PROBLEM, tokens=64, neighbours=neighbours, guess=guess, **usual | changed)


def measured(time_us):
    return Measured(
        median_us=time_us, spread_us=1.0, samples=3, flops_per_byte=NONE, bandwidth_gbps=NONE, issue_efficiency=NONE
    )


def outcome_of(config):
    if config.num_warps == 8:
        return Failed(FailureKind.SLOW, "out of the race")
    return measured(100.0 + abs(config.block_n - 64) + config.num_warps - 5 * config.prefetch_distance)


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


def test_the_default_strategy_is_one_of_them():
    assert DEFAULT_STRATEGY in STRATEGIES


@EVERY_STRATEGY
@pytest.mark.parametrize("batch", [1, 4, 100])
def test_it_asks_no_config_twice_stays_in_its_terrain_and_ends(name, batch):
    asked = play(STRATEGIES[name](terrain(), 0), batch)
    assert asked
    assert len(set(asked)) == len(asked)
    assert set(asked) <= REACHABLE


@EVERY_STRATEGY
def test_the_same_seed_and_answers_give_the_same_order(name):
    first, second = (play(STRATEGIES[name](terrain(), 7)) for _ in range(2))
    assert first == second


@EVERY_STRATEGY
def test_it_survives_when_everything_fails(name):
    assert play(STRATEGIES[name](terrain(), 0), answer=lambda _: CRASH)


@EVERY_STRATEGY
def test_it_survives_when_all_but_the_last_fail(name):
    ends = iter([*[CRASH] * 7, *[measured(50.0)] * 100])
    assert len(play(STRATEGIES[name](terrain(), 0), answer=lambda _: next(ends))) > 7


@EVERY_STRATEGY
def test_asking_for_nothing_gives_nothing_and_loses_nothing(name):
    strategy, other = STRATEGIES[name](terrain(), 0), STRATEGIES[name](terrain(), 0)
    assert list(strategy.ask(0)) == []
    assert play(strategy) == play(other)


@EVERY_STRATEGY
def test_an_empty_terrain_is_over_at_once(name):
    strategy = STRATEGIES[name](terrain(compiled=(), reserve=()), 0)
    assert list(strategy.ask(8)) == []


@LIMITED
@pytest.mark.parametrize(("kernels", "trials"), [(0, 5), (1, 20), (6, 12)])
def test_it_keeps_to_the_plan_of_trials_and_kernels(name, kernels, trials):
    asked = play(STRATEGIES[name](terrain(kernels=kernels, trials=trials), 0))
    assert len(asked) <= trials
    assert len(set(asked) - set(COMPILED)) <= kernels


@LIMITED
def test_a_plan_of_one_trial_is_spent_and_not_rounded_to_none(name):
    assert len(play(STRATEGIES[name](terrain(kernels=1, trials=1), 0))) == 1


@EVERY_STRATEGY
def test_a_config_told_again_is_taken_at_its_latest_time(name):
    strategy = STRATEGIES[name](terrain(), 0)
    first = strategy.ask(8)
    for config in first:
        strategy.tell(config, outcome_of(config))
    strategy.tell(first[0], outcome_of(first[0]))
    assert not set(strategy.ask(8)) & set(first)


def test_the_exhaustive_search_tries_all_whatever_the_plan():
    asked = play(STRATEGIES["exhaustive"](terrain(kernels=0, trials=1), 0))
    assert set(asked) == {*COMPILED, *RESERVE}
    assert len(asked) == len(COMPILED) + len(RESERVE)


def test_another_seed_gives_another_random_order():
    assert play(RandomOrder(terrain(), 1)) != play(RandomOrder(terrain(), 2))
