from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from moetune.engine.bench import Bench
from moetune.engine.budget import Deadline
from moetune.engine.compose import FINALISTS, PER_BLOCK_M, compose
from moetune.engine.entrance import by_turns
from moetune.engine.finals import Finals, Verdict
from moetune.engine.last_heat import FIRST_BLOCK
from moetune.engine.race import Race, Standing, finish
from moetune.outcome import Failed, FailureKind, Figure, Measured, Stage, Subject, Trial
from moetune.space.prior import Problem
from moetune.strategies import Exhaustive, Terrain
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.plan import LayerPlan

BASE = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
WRONG = Failed(FailureKind.WRONG, "relative error 0.2")
NONE = Figure.unavailable("not measured here")


def measured(median_us, samples=20):
    return Measured(
        median_us=median_us,
        spread_us=0.01,
        samples=samples,
        flops_per_byte=NONE,
        bandwidth_gbps=NONE,
        issue_efficiency=NONE,
    )


def plan(block_n, block_m=16):
    config = replace(BASE, block_n=block_n, block_m=block_m)
    return LayerPlan(gate_up=config, down=config)


DEFAULT, SLOW, FAST, FASTEST = plan(16), plan(32), plan(64), plan(128)
TIMES = {DEFAULT: 100.0, SLOW: 120.0, FAST: 90.0, FASTEST: 80.0}


def decide(fake_backend, plans=(SLOW, FAST, FASTEST), wrong=(), fails=None, rerouted=None):
    fails = fails or {}
    backend = fake_backend(
        rerouted=rerouted or (lambda plans, rounds: ()),
        layer=lambda the_plan, rounds, tokens: fails.get(the_plan) or measured(TIMES[the_plan], rounds),
        verify_layer=lambda the_plan: WRONG if the_plan in wrong else None,
    )
    bench = Bench(backend, backend.journal, lambda _: None)
    backend.open(64)
    return Finals(bench, 64, DEFAULT, Deadline(inf, lambda: 0.0)).run(list(plans)), backend.journal


def won(verdict):
    assert isinstance(verdict, Verdict), verdict
    return verdict.winner.plan, verdict.baseline_us


def test_the_fastest_plan_wins_and_is_verified_as_a_layer(fake_backend):
    verdict, journal = decide(fake_backend)
    assert won(verdict) == (FASTEST, 100.0)
    verified = {trial.choice for trial in journal.trials if trial.verified}
    assert verified == {SLOW, FAST, FASTEST, DEFAULT}  # all that reach the last heat, before it is run
    assert {(trial.subject, trial.stage) for trial in journal.trials} == {(Subject.LAYER, Stage.FINAL)}
    assert len(journal.trials) == 4


def test_a_layer_that_is_wrong_leaves_the_entry_to_the_next(fake_backend):
    verdict, journal = decide(fake_backend, wrong=[FASTEST])
    assert won(verdict) == (FAST, 100.0)
    assert next(trial.outcome for trial in journal.trials if trial.choice == FASTEST) == WRONG


def wrong_when_timed_long(*plans):
    """The last heat's replays leave a wrong output, the first heat's do not."""
    return lambda the_plan, rounds, tokens: (
        WRONG if the_plan in plans and rounds > 6 else measured(TIMES[the_plan], rounds)
    )


def decide_after(fake_backend, *wrong, **hooks):
    backend = fake_backend(layer=wrong_when_timed_long(*wrong), **hooks)
    bench = Bench(backend, backend.journal, lambda _: None)
    backend.open(64)
    return Finals(bench, 64, DEFAULT, Deadline(inf, lambda: 0.0)).run([SLOW, FAST, FASTEST]), backend


def test_a_layer_that_is_wrong_after_its_replays_leaves_the_entry_to_the_next(fake_backend):
    verdict, backend = decide_after(fake_backend, FASTEST)
    assert won(verdict) == (FAST, 100.0)
    lost = next(trial for trial in backend.journal.trials if trial.choice == FASTEST)
    assert (lost.outcome, lost.verified) == (WRONG, False)


def test_a_default_that_is_wrong_after_its_replays_is_no_baseline(fake_backend):
    asked = []
    verdict, _ = decide_after(fake_backend, DEFAULT, rerouted=lambda plans, rounds: asked.append(plans))
    assert won(verdict) == (FASTEST, None)
    assert asked == []


def test_when_all_are_wrong_after_their_replays_nobody_wins(fake_backend):
    verdict, _ = decide_after(fake_backend, SLOW, FAST, FASTEST, DEFAULT)
    assert verdict == WRONG


def test_all_that_run_in_the_last_heat_are_verified_before_it(fake_backend):
    asked = []

    class Logged(fake_backend):
        def verify_layer(self, plan):
            asked.append(plan)
            return super().verify_layer(plan)

        def time_layers(self, plans, rounds):
            asked.append(rounds)
            return super().time_layers(plans, rounds)

    decide(Logged)
    first, last = (place for place, what in enumerate(asked) if isinstance(what, int))
    assert asked[first] == 6
    assert asked[first + 1 : last] == [FASTEST, FAST, SLOW, DEFAULT]
    assert asked[last:] == [FIRST_BLOCK]


def test_a_wrong_layer_makes_room_in_the_last_heat(fake_backend):
    plans = [plan(16, block_m) for block_m in (32, 64, 128)]
    for place, the_plan in enumerate(plans):
        TIMES[the_plan] = 50.0 + place
    _, journal = decide(fake_backend, plans=[*plans, FASTEST, FAST, SLOW], wrong=plans)
    samples = {trial.choice: trial.outcome.samples for trial in journal.trials if trial.verified}
    assert samples == {FASTEST: FIRST_BLOCK, FAST: FIRST_BLOCK, SLOW: FIRST_BLOCK, DEFAULT: FIRST_BLOCK}


def test_the_default_stays_when_nothing_beats_it(fake_backend):
    verdict, _ = decide(fake_backend, plans=[SLOW])
    assert won(verdict) == (DEFAULT, 100.0)


def test_a_wrong_default_is_no_baseline_and_the_best_right_plan_wins_even_if_slower(fake_backend):
    verdict, _ = decide(fake_backend, plans=[SLOW], wrong=[DEFAULT])
    assert won(verdict) == (SLOW, None)


def test_a_default_that_cannot_run_is_no_baseline(fake_backend):
    verdict, _ = decide(fake_backend, fails={DEFAULT: Failed(FailureKind.RESOURCES, "out of memory")})
    assert won(verdict) == (FASTEST, None)


def rerouted(times_us):
    """Two other routings: the typical times under the first, the planted ones under the second."""

    def answer(plans, rounds):
        planted = [times_us.get(plan, TIMES[plan]) for plan in plans]
        return [
            [measured(TIMES[plan], rounds) for plan in plans],
            [time_us if isinstance(time_us, Failed) else measured(time_us, rounds) for time_us in planted],
        ]

    return answer


def test_a_plan_that_loses_when_other_experts_are_touched_leaves_the_entry_to_the_next(fake_backend):
    verdict, journal = decide(fake_backend, rerouted=rerouted({FASTEST: 100.6}))
    assert won(verdict) == (FAST, 100.0)
    lost = next(trial for trial in journal.trials if trial.choice == FASTEST)
    assert lost.outcome.kind is FailureKind.SLOW
    assert "100.6 us against 100.0 us" in lost.outcome.reason


def test_a_plan_within_noise_of_the_default_under_another_routing_keeps_the_entry(fake_backend):
    verdict, _ = decide(fake_backend, rerouted=rerouted({FASTEST: 100.4}))
    assert won(verdict) == (FASTEST, 100.0)


def test_the_default_stays_when_all_others_lose_under_another_routing(fake_backend):
    asked = []

    def answer(plans, rounds):
        asked.append(plans)
        return rerouted({FAST: 101.0, FASTEST: 130.0})(plans, rounds)

    verdict, _ = decide(fake_backend, rerouted=answer)
    assert won(verdict) == (DEFAULT, 100.0)
    assert asked == [[FASTEST, DEFAULT], [FAST, DEFAULT]]


def test_a_plan_that_fails_under_another_routing_is_out(fake_backend):
    fault = Failed(FailureKind.LAUNCH, "misaligned address")
    verdict, journal = decide(fake_backend, rerouted=rerouted({FASTEST: fault}))
    assert won(verdict) == (FAST, 100.0)
    assert next(trial.outcome for trial in journal.trials if trial.choice == FASTEST) == fault


def test_a_default_that_fails_under_another_routing_takes_no_entry_away(fake_backend):
    verdict, _ = decide(fake_backend, rerouted=rerouted({DEFAULT: WRONG}))
    assert won(verdict) == (FASTEST, 100.0)


def test_a_plan_that_took_the_device_down_in_an_earlier_run_is_not_launched_again(fake_backend):
    fault = Failed(FailureKind.LAUNCH, "an illegal memory access")
    crashed = Trial(subject=Subject.LAYER, tokens=64, choice=FASTEST, stage=Stage.FINAL, outcome=fault)
    launched = []
    backend = fake_backend(
        layer=lambda the_plan, rounds, tokens: launched.append(the_plan) or measured(TIMES[the_plan], rounds)
    )
    bench = Bench(backend, backend.journal, lambda _: None, {(Subject.LAYER, 64, FASTEST): crashed})
    backend.open(64)
    verdict = Finals(bench, 64, DEFAULT, Deadline(inf, lambda: 0.0)).run([FASTEST, FAST])
    assert won(verdict) == (FAST, 100.0)
    assert FASTEST not in launched
    assert {trial.choice for trial in backend.journal.trials} == {FAST, DEFAULT}


def test_a_plan_that_missed_the_last_heat_wins_when_all_before_it_are_wrong(fake_backend):
    plans = [plan(16, block_m) for block_m in (32, 64, 128)]
    for place, the_plan in enumerate(plans):
        TIMES[the_plan] = 50.0 + place
    verdict, _ = decide(fake_backend, plans=[*plans, FAST], wrong=[*plans, DEFAULT])
    assert won(verdict) == (FAST, None)


@pytest.mark.parametrize("wrong", [[DEFAULT, SLOW, FAST, FASTEST]], ids=["all-wrong"])
def test_no_right_plan_is_a_failure_with_its_reason(fake_backend, wrong):
    verdict, _ = decide(fake_backend, wrong=wrong)
    assert verdict == WRONG


def test_pairs_share_a_block_m_that_routing_can_serve():
    def standings(block_us):
        return [Standing(replace(BASE, block_m=block_m), measured(time_us)) for block_m, time_us in block_us.items()]

    gate_up, down = standings({16: 50.0, 32: 40.0, 64: 10.0}), standings({16: 20.0, 32: 60.0})
    found = compose(gate_up, down, {16: 5.0, 32: 1.0, 64: 1.0})
    assert [(composed.plan.block_m, composed.sum_us) for composed in found] == [(16, 75.0), (32, 101.0)]


def test_a_second_block_m_is_heard_among_the_finalists():
    many = [Standing(replace(BASE, block_n=width), measured(10.0)) for width in (16, 32, 64, 128)]
    other = Standing(replace(BASE, block_m=32), measured(50.0))
    found = compose([*many, other], [*many, other], {16: 1.0, 32: 1.0})
    assert len(found) == FINALISTS
    assert 32 in {composed.plan.block_m for composed in found[: PER_BLOCK_M + 1]}


def test_one_kernel_does_not_fill_the_finals_because_sums_err():
    gate_up = [
        Standing(replace(BASE, block_n=width), measured(100.0 + place)) for place, width in enumerate((32, 64, 128))
    ]
    down = [Standing(replace(BASE, block_n=width), measured(50.0 + place)) for place, width in enumerate((32, 64, 128))]
    found = compose(gate_up, down, {16: 1.0}, 5)
    assert len(found) == 5
    assert found[0].plan == LayerPlan(gate_up=gate_up[0].config, down=down[0].config)
    for kernels in ([item.plan.gate_up for item in found], [item.plan.down for item in found]):
        assert max(map(kernels.count, kernels)) <= 2
        assert len(set(kernels)) == 3


def test_kernels_timed_in_longer_bursts_are_not_beaten_by_those_timed_once(fake_backend):
    """A GPU under its power cap is faster in three launches than in twenty-five."""
    tired = fake_backend()
    tired.time_kernel = lambda role, config, samples: measured(100.0 + config.block_n / 100 + samples / 4, samples)
    tired.first_launch_us = lambda role, config: 100.0
    bench = Bench(tired, tired.journal, lambda _: None)
    configs = [replace(BASE, block_n=width, num_warps=warps) for width in (16, 32, 64, 128) for warps in (2, 4, 8)]
    never = Deadline(inf, lambda: 0.0)
    bench.request((Role.DOWN, config) for config in configs)
    bench.promised.update(bench.under_way)
    assert bench.await_promised(never)
    tired.open(64)
    problem = Problem(tired.shape, tired.device, Role.DOWN)
    strategy = Exhaustive(
        Terrain(
            problem=problem,
            tokens=64,
            compiled=tuple(configs),
            neighbours=lambda _: (),
            guess=lambda *_: 1.0,
            trials=100,
        )
    )
    race = Race(bench, Role.DOWN, 64)
    by_turns([race.entering(strategy, never)])
    finish([race], never)
    standings = race.standings()
    assert [standing.config.block_n for standing in standings[:3]] == [16, 16, 16]
    assert standings[0].measured.samples == 25
    samples = [standing.measured.samples for standing in standings]
    assert samples == sorted(samples, reverse=True)
