"""The last heat on a GPU whose noise is known: who wins, how sure that is, and after how many rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest

from moetune.engine.bench import Bench
from moetune.engine.budget import Deadline
from moetune.engine.finals import FIRST_ROUNDS, Finals, Verdict
from moetune.engine.last_heat import FEWEST_ROUNDS, FIRST_BLOCK, MOST_ROUNDS, LastHeat
from moetune.outcome import ClockSpan, Failed, FailureKind, Figure, Measured, Source, summarize
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.plan import LayerPlan

NEVER = Deadline(inf, lambda: 0.0)
NONE = Figure.unavailable("not measured here")
BASE = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)


def plan(block_n, structure=Structure.GATHER):
    config = replace(BASE, block_n=block_n, structure=structure)
    return LayerPlan(gate_up=config, down=config)


DEFAULT, SIMPLE, FANCY, OTHER = plan(16), plan(32), plan(64, Structure.TMA), plan(128)


class NoisyGpu:
    """Plans with true times, under a clock that drifts and noise of its own for each sample; remembers what was asked."""

    def __init__(self, true_us, seed=0, sigma=0.004, drift=0.03, fails=None):
        self.true_us, self.draw, self.sigma, self.drift, self.fails = true_us, Random(seed), sigma, drift, fails or {}
        self.samples, self.blocks = 0, []

    def time(self, plans, rounds):
        assert rounds % 2 == 0
        self.blocks.append((list(plans), rounds))
        times = {one: [] for one in plans}
        for turn in range(rounds):
            for one in plans if turn % 2 == 0 else reversed(plans):
                self.samples += 1
                clock = 1.0 + self.drift * min(self.samples / 600, 1.0)
                spike = 1.2 if self.draw.random() < 0.01 else 1.0
                times[one].append(
                    round(self.true_us[one] * clock * spike * (1.0 + self.draw.gauss(0.0, self.sigma)), 3)
                )
        return {one: self.outcome(one, times[one]) for one in plans}

    def clocks(self, block):
        return ClockSpan(sm_mhz=(2000 - 10 * block, 2000))

    def outcome(self, one, times_us):
        if len(self.blocks) >= self.fails.get(one, inf):
            return Failed(FailureKind.LAUNCH, "misaligned address")
        sample = summarize(times_us)
        return Measured(
            median_us=sample.median_us,
            spread_us=sample.spread_us,
            samples=sample.count,
            flops_per_byte=NONE,
            bandwidth_gbps=Figure(1e6 / sample.median_us, Source.ANALYTICAL),
            issue_efficiency=NONE,
            times_us=tuple(times_us),
            clocks=self.clocks(len(self.blocks)),
        )


def heat_of(gpu, noise=0.005, deadline=NEVER, preferred=()):
    """Return the last heat's outcomes, without the first heat's six rounds."""
    first = gpu.time(list(gpu.true_us), FIRST_ROUNDS)
    gpu.blocks.clear()
    return LastHeat(gpu.time, DEFAULT, deadline, noise, preferred).run(list(gpu.true_us), first)


def most_rounds(outcomes):
    return max(len(outcome.times_us) for outcome in outcomes.values())


def winner_of(fake_backend, gpu, noise=0.005):
    backend = fake_backend()
    backend.time_layers = lambda plans, rounds: list(gpu.time(plans, rounds).values())
    backend.open(64)
    bench = Bench(backend, backend.journal, lambda _: None)
    verdict = Finals(bench, 64, DEFAULT, NEVER, noise).run([one for one in gpu.true_us if one != DEFAULT])
    assert isinstance(verdict, Verdict)
    return verdict.winner.plan


def test_clear_differences_end_after_the_first_block():
    gpu = NoisyGpu({DEFAULT: 100.0, SIMPLE: 90.0, FANCY: 80.0})
    outcomes = heat_of(gpu)
    assert [rounds for _, rounds in gpu.blocks] == [FIRST_BLOCK]
    assert {len(outcome.times_us) for outcome in outcomes.values()} == {FIRST_BLOCK}


def test_near_plans_are_timed_on_until_they_are_told_apart_and_those_far_behind_are_not():
    gpu = NoisyGpu({DEFAULT: 100.0, SIMPLE: 90.0, FANCY: 80.3, OTHER: 80.0}, seed=3, sigma=0.006)
    outcomes = heat_of(gpu)
    assert len(gpu.blocks) > 1
    assert all(rounds % 2 == 0 for _, rounds in gpu.blocks)
    later = {one for plans, _ in gpu.blocks[1:] for one in plans}
    assert later == {DEFAULT, FANCY, OTHER}  # the default is timed throughout: it is the baseline
    assert len(outcomes[SIMPLE].times_us) == FIRST_BLOCK
    assert len(outcomes[FANCY].times_us) == len(outcomes[DEFAULT].times_us) > FIRST_BLOCK


@pytest.mark.parametrize("seed", range(5))
def test_of_many_near_plans_only_those_are_timed_on_that_must_be_told_apart(seed):
    tiles = [plan(block_n, Structure.TMA) for block_n in (32, 64, 128, 256)]
    gpu = NoisyGpu({DEFAULT: 100.0, SIMPLE: 80.0, **dict.fromkeys(tiles, 80.0)}, seed, sigma=0.01)
    outcomes = heat_of(gpu)
    later = [plans for plans, _ in gpu.blocks[1:]]
    assert later
    assert all(DEFAULT in plans and SIMPLE in plans for plans in later)  # the baseline, and the winner among equals
    assert all(len(plans) <= 4 for plans in later)  # of six: these two, the leader and the second
    assert all(set(after) <= set(before) for before, after in pairwise(later))
    rounds = {one: len(outcome.times_us) for one, outcome in outcomes.items()}
    assert rounds[DEFAULT] == max(rounds.values())
    assert min(rounds.values()) == FIRST_BLOCK


def test_a_plan_that_is_surely_slower_but_by_less_than_the_noise_is_timed_on_because_it_may_win_by_being_simpler():
    gpu = NoisyGpu({DEFAULT: 100.0, FANCY: 80.0, OTHER: 80.02, SIMPLE: 80.3}, sigma=0.001)
    outcomes = heat_of(gpu, noise=0.005)
    assert len(gpu.blocks) == 1  # all clear already: what follows asks the rule itself
    assert not [
        one for one in (SIMPLE, OTHER) if one not in LastHeat(gpu.time, DEFAULT, NEVER, 0.005)._contenders(outcomes)
    ]
    assert SIMPLE not in LastHeat(gpu.time, DEFAULT, NEVER, 0.001)._contenders(outcomes)


def test_recorded_rounds_are_all_that_there_are(fake_backend):
    """A replay gives the same rounds however often it is asked: to add them up would only look surer."""
    gpu = NoisyGpu({DEFAULT: 100.0, SIMPLE: 99.0}, sigma=0.03)
    kept = gpu.time([SIMPLE, DEFAULT], FIRST_BLOCK)
    backend, asked = fake_backend(), []
    backend.recorded_plans = lambda tokens: list(kept)
    backend.time_layers = lambda plans, rounds: asked.append(rounds) or [kept[one] for one in plans]
    backend.open(64)
    verdict = Finals(Bench(backend, backend.journal, lambda _: None), 64, DEFAULT, NEVER).run([SIMPLE])
    assert asked == [FIRST_ROUNDS, FEWEST_ROUNDS]
    assert {trial.outcome.samples for trial in backend.journal.trials} == {FIRST_BLOCK}
    assert verdict.winner.plan == DEFAULT


def test_all_rounds_count_in_what_comes_out():
    gpu = NoisyGpu({DEFAULT: 100.0, FANCY: 80.3, OTHER: 80.0}, seed=3, sigma=0.006)
    outcome = heat_of(gpu)[OTHER]
    sample = summarize(outcome.times_us)
    assert (outcome.median_us, outcome.spread_us, outcome.samples) == (sample.median_us, sample.spread_us, sample.count)
    assert outcome.bandwidth_gbps.value == pytest.approx(1e6 / outcome.median_us)
    assert outcome.issue_efficiency == NONE
    assert len(gpu.blocks) > 1
    assert outcome.clocks.sm_mhz == (2000 - 10 * len(gpu.blocks), 2000)


def test_clocks_of_an_early_block_count_too():
    gpu = NoisyGpu({DEFAULT: 100.0, FANCY: 80.3, OTHER: 80.0}, seed=3, sigma=0.006)
    first_hot = {1: ("hardware thermal slowdown",)}
    gpu.clocks = lambda block: ClockSpan(throttle=first_hot.get(block, ()))
    assert heat_of(gpu)[OTHER].clocks.slowdowns == ("hardware thermal slowdown",)


@pytest.mark.parametrize("seed", range(5))
def test_equals_end_when_their_difference_is_surely_under_the_noise(seed):
    quiet = heat_of(NoisyGpu({DEFAULT: 100.0, SIMPLE: 80.0, FANCY: 80.0}, seed, sigma=0.002))
    assert most_rounds(quiet) < MOST_ROUNDS
    wide = heat_of(NoisyGpu({DEFAULT: 100.0, SIMPLE: 80.0, FANCY: 80.0}, seed, sigma=0.002), noise=0.02)
    assert most_rounds(wide) == FIRST_BLOCK
    exact = heat_of(NoisyGpu({DEFAULT: 100.0, SIMPLE: 80.0, FANCY: 80.0}, seed, sigma=0.02))
    assert most_rounds(exact) <= MOST_ROUNDS


def test_what_is_never_clear_ends_at_the_most_rounds():
    gpu = NoisyGpu({DEFAULT: 100.0, SIMPLE: 80.0, FANCY: 80.0}, seed=1, sigma=0.03)
    assert most_rounds(heat_of(gpu)) == MOST_ROUNDS


def test_the_deadline_and_the_seconds_of_a_heat_end_it_after_whole_pairs_of_rounds():
    true_us = {DEFAULT: 100.0, SIMPLE: 80.0, FANCY: 80.0}
    late = heat_of(NoisyGpu(true_us, sigma=0.03), deadline=Deadline(-1.0, lambda: 0.0))
    assert most_rounds(late) == FEWEST_ROUNDS
    long_layers = NoisyGpu({one: 1000 * time_us for one, time_us in true_us.items()}, sigma=0.03)
    rounds = most_rounds(heat_of(long_layers))  # 0.26 s a round
    assert rounds == 10
    gpu = NoisyGpu(true_us, sigma=0.03)
    soon = heat_of(gpu, deadline=Deadline(0.015, lambda: 0.2e-3 * gpu.samples))  # 0.6 ms a round, six of them before
    assert most_rounds(soon) == FIRST_BLOCK + 2


def test_a_plan_that_fails_in_a_later_block_has_failed_and_the_others_go_on():
    gpu = NoisyGpu({DEFAULT: 100.0, FANCY: 80.2, OTHER: 80.0}, seed=3, sigma=0.006, fails={OTHER: 2})
    outcomes = heat_of(gpu)
    assert outcomes[OTHER] == Failed(FailureKind.LAUNCH, "misaligned address")
    assert isinstance(outcomes[FANCY], Measured)
    assert len(gpu.blocks) == 2  # what is left is clear


def test_nobody_ran_is_no_crash():
    gpu = NoisyGpu({DEFAULT: 100.0, SIMPLE: 80.0}, fails={DEFAULT: 1, SIMPLE: 1})
    assert all(isinstance(outcome, Failed) for outcome in heat_of(gpu).values())
    assert LastHeat(gpu.time, DEFAULT, NEVER, 0.005).run([], {}) == {}


# What it is for: how often a sweep crowns the wrong plan


def winners(fake_backend, true_us, trials=60, **gpu):
    found = Counter()
    for seed in range(trials):
        found[winner_of(fake_backend, NoisyGpu(true_us, seed=seed, **gpu))] += 1
    return found


def test_a_plan_one_and_a_half_percent_ahead_wins_nearly_always(fake_backend):
    found = winners(fake_backend, {DEFAULT: 100.0, SIMPLE: 98.5})
    assert found[SIMPLE] >= 59


def test_a_plan_as_fast_as_the_default_hardly_ever_wins(fake_backend):
    found = winners(fake_backend, {DEFAULT: 100.0, SIMPLE: 100.0, FANCY: 100.0, OTHER: 100.0})
    assert found[DEFAULT] >= 59


def test_under_the_noise_the_default_stays_however_sure_the_difference_is(fake_backend):
    found = winners(fake_backend, {DEFAULT: 100.0, SIMPLE: 99.8}, sigma=0.001)
    assert found[DEFAULT] == 60


def test_of_two_equals_the_simpler_one_wins(fake_backend):
    found = winners(fake_backend, {DEFAULT: 100.0, FANCY: 80.0, SIMPLE: 80.1}, sigma=0.002)
    assert found[SIMPLE] == 60


def test_a_plan_one_percent_ahead_of_a_simpler_one_wins_nearly_always(fake_backend):
    found = winners(fake_backend, {DEFAULT: 100.0, FANCY: 80.0, SIMPLE: 80.8})
    assert found[FANCY] >= 59


@pytest.mark.parametrize(("noise", "wins"), [(0.005, FANCY), (0.03, SIMPLE)])
def test_the_noise_decides_what_equal_means(fake_backend, noise, wins):
    gpu = NoisyGpu({DEFAULT: 100.0, FANCY: 80.0, SIMPLE: 81.2}, seed=4, sigma=0.002)
    assert winner_of(fake_backend, gpu, noise) == wins


def test_fewer_samples_are_taken_than_by_a_fixed_number_of_rounds_where_things_are_clear(fake_backend):
    true_us = {DEFAULT: 100.0, SIMPLE: 92.0, FANCY: 80.0, OTHER: 85.0}
    gpu = NoisyGpu(true_us)
    winner_of(fake_backend, gpu)
    assert gpu.samples == len(true_us) * (FIRST_ROUNDS + FIRST_BLOCK)
