from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from moetune.engine.bench import MAX_SPILLS, Bench
from moetune.engine.budget import Deadline
from moetune.engine.entrance import by_turns
from moetune.engine.race import SAFE_ENTRANTS, Race, finish, worthwhile
from moetune.outcome import Compiled, Failed, FailureKind, Measured, Subject
from moetune.space.prior import Problem
from moetune.strategies import Exhaustive, Guided, Terrain
from moetune_kernels.config import MoEKernelConfig, Role, Structure

ROLE = Role.DOWN
BASE = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
RIGHT = replace(BASE, block_n=128)
CONFIGS = tuple(
    replace(BASE, block_n=block_n, num_warps=num_warps) for block_n in (16, 32, 64, 128) for num_warps in (2, 4, 8)
)
NEVER = Deadline(inf, lambda: 0.0)


def race_of(backend, deadline=NEVER, compiled=CONFIGS):
    bench = Bench(backend, backend.journal, lambda _: None)
    compile_all(bench, compiled)
    backend.open(64)
    race = Race(bench, ROLE, 64)
    race.deadline = deadline
    return race


def compile_all(bench, configs):
    bench.request((ROLE, config) for config in configs)
    bench.promised.update(bench.under_way)
    assert bench.await_promised(NEVER)


def ended_in(race):
    journal: Any = race.bench.journal  # the fake GPU's own
    return journal.trials


def terrain(race, configs, **rest):
    backend = race.bench.backend
    known = {"neighbours": lambda _: (), "guess": lambda config, tokens: 1.0, "trials": 100}
    return Terrain(
        problem=Problem(backend.shape, backend.device, ROLE), tokens=64, compiled=tuple(configs), **known | rest
    )


def run(race, configs=CONFIGS):
    return run_search(race, Exhaustive(terrain(race, configs)))


def run_search(race, strategy):
    by_turns([race.entering(strategy, race.deadline)])
    race.enter_late(race.deadline)
    finish([race], race.deadline)
    return race.standings()


def times(table, default=500.0):
    return lambda role, config, tokens: table.get(config, default)


def wrong(*configs):
    reason = Failed(FailureKind.WRONG, "relative error 0.41")
    return lambda role, config: reason if config in configs else None


def test_the_fastest_right_config_finishes_first_with_the_most_samples(fake_backend):
    table = {config: 100.0 + place for place, config in enumerate(CONFIGS)}
    standings = run(race_of(fake_backend(kernel_us=times(table))))
    assert standings[0].config == CONFIGS[0]
    assert standings[0].measured.samples == 25
    assert all(standing.measured.median_us <= 125.0 for standing in standings)


def test_fast_but_wrong_kernels_never_finish_even_when_the_right_one_is_the_slowest(fake_backend):
    planted = CONFIGS[:3]
    table = dict.fromkeys(planted, 50.0) | {RIGHT: 110.0}
    race = race_of(fake_backend(kernel_us=times(table), verify_kernel=wrong(*planted)), compiled=(*planted, RIGHT))
    standings = run(race, (*planted, RIGHT))
    assert [standing.config for standing in standings] == [RIGHT]
    ended = [trial for trial in ended_in(race) if trial.choice in planted and isinstance(trial.outcome, Failed)]
    assert {trial.choice for trial in ended} == set(planted)
    assert {trial.outcome for trial in ended} == {Failed(FailureKind.WRONG, "relative error 0.41")}


def test_a_wrong_kernel_that_set_the_pace_does_not_shut_the_right_ones_out(fake_backend):
    cheat = CONFIGS[0]
    race = race_of(fake_backend(kernel_us=times({cheat: 1.0, RIGHT: 100.0}), verify_kernel=wrong(cheat)))
    standings = run(race)
    assert standings[0].config == RIGHT


def test_a_kernel_that_is_wrong_after_its_launches_makes_room_for_those_it_kept_out(fake_backend):
    cheat, lost = CONFIGS[0], Failed(FailureKind.WRONG, "down: after timing: relative L2 error 0.3")
    table = {config: 100.0 + place for place, config in enumerate(CONFIGS)} | {cheat: 50.0}  # alone in both heats
    backend = fake_backend(
        kernel_us=times(table), recheck_kernel=lambda role, config: lost if config == cheat else None
    )
    race = race_of(backend)
    standings = run(race)
    assert standings[0].config == CONFIGS[1]
    assert standings[0].measured.samples == 25
    assert backend.calls["recheck_kernel", ROLE, CONFIGS[1], 64] == 1
    assert cheat not in {standing.config for standing in standings}
    last = [trial for trial in ended_in(race) if trial.choice == cheat][-1]
    assert (last.outcome, last.verified) == (lost, False)


def test_a_wrong_kernel_found_after_its_launches_does_not_shut_out_those_its_first_launch_refused(fake_backend):
    cheat, lost = CONFIGS[0], Failed(FailureKind.WRONG, "down: after timing: relative L2 error 0.3")
    backend = fake_backend(
        kernel_us=times({cheat: 1.0, RIGHT: 100.0}),
        recheck_kernel=lambda role, config: lost if config == cheat else None,
    )
    standings = run(race_of(backend))
    assert standings[0].config == RIGHT
    assert backend.calls["recheck_kernel", ROLE, RIGHT, 64] == 1


def test_a_finisher_is_verified_before_its_last_launches_and_compared_right_after_them(fake_backend):
    asked = []

    class Logged(fake_backend):
        def time_kernel(self, role, config, samples):
            asked.append((samples, config))
            return super().time_kernel(role, config, samples)

        def verify_kernel(self, role, config):
            asked.append(("verify", config))
            return super().verify_kernel(role, config)

        def recheck_kernel(self, role, config):
            asked.append(("recheck", config))
            return super().recheck_kernel(role, config)

    standings = run(race_of(Logged(kernel_us=times(dict.fromkeys(CONFIGS, 100.0)))))
    finishers = [standing.config for standing in standings if standing.measured.samples == 25]
    assert len(finishers) == 4
    for config in finishers:
        place = asked.index((25, config))
        assert asked[place + 1] == ("recheck", config)
        assert ("verify", config) in asked[:place]
    assert sum(what == "recheck" for what, _ in asked) == len(finishers)


def test_a_first_launch_over_two_and_a_half_times_the_best_gets_no_second(fake_backend):
    slow = CONFIGS[1]
    table = dict.fromkeys(CONFIGS, 100.0) | {slow: 260.0}
    race = race_of(fake_backend(kernel_us=times(table)))
    run(race)
    ended = [trial for trial in ended_in(race) if trial.choice == slow]
    assert [trial.outcome.kind for trial in ended] == [FailureKind.SLOW]
    assert "2.5 times" in ended[0].outcome.reason


def test_survivors_are_compared_with_the_reference_once_and_others_not_at_all(fake_backend):
    table = {config: 100.0 + 30 * place for place, config in enumerate(CONFIGS)}
    backend = fake_backend(kernel_us=times(table))
    run(race_of(backend))
    verified = {
        call[2]: count
        for call, count in backend.calls.items()
        if isinstance(call, tuple) and call[0] == "verify_kernel"
    }
    assert verified == {CONFIGS[0]: 1}


def test_spilling_and_refused_kernels_are_dropped_with_their_reason_before_they_run(fake_backend):
    spilling, refused = CONFIGS[0], CONFIGS[1]

    def compile_hook(role, config):
        if config == refused:
            return Failed(FailureKind.COMPILE, "PassManager::run failed")
        spills = MAX_SPILLS + 1 if config == spilling else MAX_SPILLS
        return Compiled(registers=255, spills=spills, smem_bytes=1, block_size=config.block_size)

    backend = fake_backend(compile=compile_hook)
    race = race_of(backend)
    standings = run(race)
    reasons = {trial.choice: trial.outcome for trial in ended_in(race) if trial.tokens == 0}
    assert reasons[refused] == Failed(FailureKind.COMPILE, "PassManager::run failed")
    assert reasons[spilling].kind is FailureKind.RESOURCES
    said = "spills 17 registers (configs that spill more than 16 are not raced)"
    assert reasons[spilling].reason == said
    assert backend.calls["first_launch"] == len(CONFIGS) - 2
    assert not {spilling, refused} & {standing.config for standing in standings}


def test_a_crashing_kernel_does_not_stop_the_race(fake_backend):
    crash = Failed(FailureKind.LAUNCH, "an illegal memory access was encountered")
    backend = fake_backend(first_launch=lambda role, config: crash if config == CONFIGS[3] else None)
    race = race_of(backend)
    assert CONFIGS[3] not in {standing.config for standing in run(race)}
    assert [trial.outcome for trial in ended_in(race) if trial.choice == CONFIGS[3]] == [crash]


def test_a_tile_height_stays_where_both_gemms_together_may_be_best_with_it(fake_backend):
    heights = (16, 32, 64)
    configs = tuple(replace(config, block_m=block_m) for block_m in heights for config in CONFIGS)
    block_us = {Role.GATE_UP: {16: 100.0, 32: 140.0, 64: 110.0}, Role.DOWN: {16: 100.0, 32: 50.0, 64: 170.0}}
    backend = fake_backend(kernel_us=lambda role, config, _: block_us[role][config.block_m] + config.num_warps)
    bench = Bench(backend, backend.journal, lambda _: None)
    bench.request((role, config) for config in configs for role in Role)
    bench.promised.update(bench.under_way)
    assert bench.await_promised(NEVER)
    backend.open(64)
    races = [Race(bench, role, 64) for role in Role]
    for race in races:
        by_turns([race.entering(Exhaustive(terrain(race, configs)), NEVER)])
    finish(races, NEVER)
    for race in races:
        assert {standing.config.block_m for standing in race.standings()} == {16, 32}  # 64 is behind by a quarter
    assert not any(
        verified[0] == "verify_kernel" and verified[2].block_m == 64 for verified in backend.calls if verified
    )


def test_a_height_that_only_one_gemm_has_is_no_height_of_the_layer():
    assert worthwhile([{16: 100.0, 32: 10.0}, {16: 100.0}]) == {16}
    assert worthwhile([{16: 100.0}, {}]) == set()


def test_a_passed_deadline_still_races_a_few_and_says_that_it_was_cut(fake_backend):
    backend = fake_backend()
    race = race_of(backend, Deadline(-1.0, lambda: 0.0))
    standings = run(race)
    assert standings
    assert backend.calls["first_launch"] == 6
    assert race.was_cut


def test_a_deadline_that_passes_while_late_kernels_are_timed_cuts_those_that_are_left(fake_backend):
    backend = fake_backend()
    deadline = Deadline(8, lambda: backend.calls["first_launch"])  # every launch takes a second
    race = race_of(backend, deadline, compiled=())
    by_turns([race.surveying(Exhaustive(terrain(race, CONFIGS)), deadline)])
    assert backend.calls["first_launch"] == 0, "all of them were left for later"
    race.enter_late(deadline)
    assert backend.calls["first_launch"] == 8
    assert race.was_cut


def test_a_race_after_the_survey_waits_for_what_the_compiler_still_has(fake_backend):
    backend = fake_backend()
    at_once = backend.ended
    backend.ended = lambda wait_s=0.0: at_once() if wait_s else []  # nothing has ended when nobody waits
    race = race_of(backend, compiled=())
    by_turns([race.entering(Exhaustive(terrain(race, CONFIGS)), NEVER)])
    assert {config for _, config, _ in backend.launched} == set(CONFIGS)
    assert not race.was_cut


def test_at_the_deadline_the_first_round_gives_way_and_not_what_a_search_asked_for(fake_backend):
    backend = fake_backend()
    backend.ended = lambda wait_s=0.0: []  # every process has another kernel in hand
    bench = Bench(backend, backend.journal, lambda _: None)
    first_round, wishes = CONFIGS[:5], CONFIGS[4:8]
    bench.request((ROLE, config) for config in first_round)
    bench.promised.update(bench.under_way)
    race, passed = Race(bench, ROLE, 64), Deadline(-1.0, lambda: 0.0)
    by_turns([race.surveying(Exhaustive(terrain(race, wishes)), passed)])
    assert not bench.await_promised(passed)
    asked = [(ROLE, config) for config in wishes]  # one of the first round among them
    assert backend.queued == list(bench.under_way) == asked
    assert set(bench.requested) == set(asked)


def test_a_hurried_race_times_what_is_compiled_and_waits_only_for_a_safe_few(fake_backend):
    backend = fake_backend()
    at_once, waits = backend.ended, []

    def one_by_one(wait_s=0.0):
        """One kernel ends whenever somebody waits for one."""
        if not wait_s:
            return []
        waits.append(wait_s)
        kernel, *rest = backend.queued
        backend.queued = [kernel]
        found = at_once()
        backend.queued = rest
        return found

    race = race_of(backend, compiled=CONFIGS[:4])
    backend.ended = one_by_one
    race.hurry(Exhaustive(terrain(race, CONFIGS)), NEVER)
    launched = [config for _, config, _ in backend.launched]
    assert launched[:4] == list(CONFIGS[:4])
    assert len(launched) == SAFE_ENTRANTS == 4 + len(waits)
    assert {config for _, config in backend.queued} == set(CONFIGS) - set(launched)
    backend.ended = at_once  # all have come since
    race.hurry(Exhaustive(terrain(race, ())), NEVER)
    assert {config for _, config, _ in backend.launched} == set(CONFIGS)
    assert not race.was_cut


def test_neighbours_are_compiled_when_the_search_asks_for_them(fake_backend):
    better = replace(CONFIGS[0], prefetch_distance=5)
    table = {config: 100.0 + place for place, config in enumerate(CONFIGS)} | {better: 60.0}
    backend = fake_backend(kernel_us=times(table))
    race = race_of(backend)
    around = terrain(
        race, CONFIGS, neighbours=lambda config: [replace(config, prefetch_distance=5)], kernels=3, trials=30
    )
    standings = run_search(race, Guided(around))
    assert standings[0].config == better
    assert len(CONFIGS) < backend.calls["compile"] <= len(CONFIGS) + 3


def test_another_race_at_the_same_count_keeps_the_finishers_of_the_first(fake_backend):
    table = {config: 100.0 + place for place, config in enumerate(CONFIGS)}
    race = race_of(fake_backend(kernel_us=times(table)))
    run(race, CONFIGS[:4])
    again = Race(race.bench, ROLE, 64)
    again.deadline = NEVER
    standings = run_search(again, Exhaustive(terrain(race, CONFIGS[4:])))
    assert standings[0].config == CONFIGS[0]
    assert {standing.config for standing in standings} & set(CONFIGS[4:])


def test_a_known_trial_is_not_timed_again(fake_backend):
    first = fake_backend()
    race = race_of(first)
    finished = run(race)
    again = fake_backend()
    bench = Bench(again, again.journal, lambda _: None, {(t.subject, t.tokens, t.choice): t for t in ended_in(race)})
    compile_all(bench, CONFIGS)
    again.open(64)
    second = Race(bench, ROLE, 64)
    second.deadline = NEVER
    assert run(second) == finished
    assert again.calls["first_launch"] == again.calls["time_kernel"] == bench.tally.trials == 0
    assert not [call for call in again.calls if call[0] == "recheck_kernel"]  # its outputs are gone


def test_trials_say_what_they_were(fake_backend):
    race = race_of(fake_backend())
    run(race)
    assert {trial.subject for trial in ended_in(race)} == {Subject.DOWN}
    assert {trial.tokens for trial in ended_in(race)} == {64}
    assert all(trial.compiled is not None for trial in ended_in(race))
    assert all(isinstance(trial.outcome, Measured) for trial in ended_in(race) if trial.verified)
