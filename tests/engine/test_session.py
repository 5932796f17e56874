from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from moetune.engine import events
from moetune.engine.budget import CAUTION, Budget, CountCost
from moetune.engine.schedule import affordable_kernels, anchors, order, polish_by_count
from moetune.engine.session import Job, Ports, Session
from moetune.errors import RunError
from moetune.outcome import Failed, FailureKind, Figure, Measured, Source, Stage, Subject
from moetune.strategies import Guided
from moetune_kernels.config import Role
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.table import Entry

from .conftest import budget_of, measured

TOKENS = (1, 8, 64, 128, 512, 1024, 4096)


class Audience:
    def __init__(self):
        self.events, self.tables = [], []
        self.journal: Any = None

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def run(backend, tmp_path, budget=None, audience=None, tokens=TOKENS, known=None, probes=0):
    audience = audience or Audience()
    audience.journal = backend.journal
    ports = Ports(
        journal=backend.journal,
        known=known or {},
        strategy=Guided,
        default_plan=lambda count: heuristic_plan(backend.shape, count, backend.device),
        write_table=lambda entries, _: audience.tables.append(dict(entries)) or tmp_path / "table.json",
        emit=audience.events.append,
    )
    job = Job(tokens=tokens, budget=budget or Budget(None), kernels=120, polish=40, probes=probes)
    return Session(backend, job, ports).run(), audience


def test_every_token_count_gets_a_verified_entry_no_slower_than_the_default(fake_backend, tmp_path):
    backend = fake_backend()
    result, audience = run(backend, tmp_path)
    assert tuple(result.entries) == TOKENS
    for entry in result.entries.values():
        assert isinstance(entry, Entry)
        assert entry.baseline_us is not None
        assert entry.median_us <= entry.baseline_us
        assert entry.plan.why_not(backend.device, backend.shape) is None
        assert entry.plan.gate_up.smem_size == 4096  # what the compiler reported
        assert {entry.flops_per_byte["source"], entry.issue_efficiency["source"]} == {"unavailable"}
    assert sum(entry.median_us < (entry.baseline_us or 0.0) for entry in result.entries.values()) >= 4
    finals = [t for t in audience.journal.trials if t.stage is Stage.FINAL and t.verified]
    assert {trial.tokens for trial in finals} == set(TOKENS)
    assert audience.journal.bounds == {tokens: 1.0 + tokens / 100 for tokens in TOKENS}
    assert not result.stopped_early


def test_the_winner_is_near_the_best_of_everything_that_was_compiled(fake_backend, tmp_path):
    backend = fake_backend()
    result, audience = run(backend, tmp_path)
    for tokens, entry in result.entries.items():
        backend.open(tokens)
        screened = {
            role: {t.choice for t in audience.journal.trials if t.subject.value == role.value and t.tokens == tokens}
            for role in Role
        }
        best_us = min(
            4.0 + sum(min(backend.kernel_us(role, c) for c in screened[role] if c.block_m == block_m) for role in Role)
            for block_m in (16, 32, 64, 128, 256)
            if all(any(c.block_m == block_m for c in screened[role]) for role in Role)
        )
        assert entry.median_us <= 1.011 * best_us


def test_the_table_is_written_after_every_token_count_with_ranges_that_meet(fake_backend, tmp_path):
    _, audience = run(fake_backend(), tmp_path)
    sizes = [len(entries) for entries in audience.tables]
    assert sizes[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert set(sizes[7:]) == {7}  # second looks, and the counters
    ranges = [entry.serves for entry in audience.tables[-1].values()]
    assert ranges[0][0] == TOKENS[0]
    assert all(high + 1 == low for (_, high), (low, _) in pairwise(ranges))
    assert audience.tables[-1][64].serves == (23, 90)  # up to the geometric means of 8 and 64, 64 and 128
    assert len(audience.of(events.TableWritten)) == len(sizes)


def test_a_token_count_is_opened_at_most_twice_and_each_kernel_compiled_once(fake_backend, tmp_path):
    backend = fake_backend()
    run(backend, tmp_path)
    surveyed, tuned = backend.opened[: -len(TOKENS)], backend.opened[-len(TOKENS) :]
    assert tuned == order(TOKENS)
    assert surveyed == [tokens for tokens in tuned if tokens in surveyed]
    assert len(surveyed) >= 3
    assert max(Counter(backend.opened).values()) <= 2
    assert 120 <= backend.calls["compile"] <= 120 + 40 + 2 * len(TOKENS)
    assert (
        max(count for call, count in backend.calls.items() if isinstance(call, tuple) and call[0] == "verify_kernel")
        == 1
    )


def test_a_token_count_without_memory_is_skipped_and_the_others_are_tuned(fake_backend, tmp_path):
    full = Failed(FailureKind.RESOURCES, "needs 200 GB for 4096 tokens, 139 GB are free")
    result, audience = run(fake_backend(open=lambda tokens: full if tokens == 4096 else None), tmp_path)
    assert tuple(result.entries) == TOKENS[:-1]
    assert audience.of(events.TokenFailed) == [events.TokenFailed(4096, full.reason)]


def test_nothing_that_runs_is_an_error_that_says_what_happened(fake_backend, tmp_path):
    wrong = Failed(FailureKind.WRONG, "relative error 0.5")
    backend = fake_backend(verify_kernel=lambda role, config: wrong, verify_layer=lambda plan: wrong)
    with pytest.raises(RunError, match=r"no token count has a plan that runs and is right \(.* wrong"):
        run(backend, tmp_path, tokens=(1, 64))


def test_a_sweep_that_can_open_no_token_count_ends_without_empty_brackets(fake_backend, tmp_path):
    full = Failed(FailureKind.RESOURCES, "needs 200 GB, 139 GB are free")
    with pytest.raises(RunError, match=r"no token count has a plan that runs and is right; see `moetune doctor`"):
        run(fake_backend(open=lambda tokens: full), tmp_path)


def test_wrong_kernels_never_reach_the_table(fake_backend, tmp_path):
    wrong = Failed(FailureKind.WRONG, "relative error 0.5")
    backend = fake_backend(
        verify_kernel=lambda role, config: wrong if config.structure.value.startswith("tma") else None,
        kernel_us=lambda role, config, tokens: 50.0 if config.structure.value.startswith("tma") else None,
        verify_layer=lambda plan: wrong if "tma" in plan.text else None,
    )
    result, _ = run(backend, tmp_path)
    assert result.failures[FailureKind.WRONG] > 0
    assert all("tma" not in entry.plan.text for entry in result.entries.values())


def test_failures_of_every_kind_are_counted_and_do_not_stop_the_sweep(fake_backend, tmp_path):
    kinds = [FailureKind.COMPILE, FailureKind.TIMEOUT, FailureKind.RESOURCES]

    def compile_hook(role, config):
        number = (config.block_n // 16 + config.prefetch_distance + config.num_warps) % 7
        return Failed(kinds[number], f"failure number {number}") if number < len(kinds) else None

    result, _ = run(fake_backend(compile=compile_hook), tmp_path)
    assert tuple(result.entries) == TOKENS
    assert all(result.failures[kind] > 0 for kind in kinds)


def test_winners_of_neighbouring_counts_are_finalists(fake_backend, tmp_path):
    result, audience = run(fake_backend(), tmp_path, tokens=TOKENS)
    late = [tokens for tokens in order(TOKENS) if tokens not in anchors(TOKENS)]
    timed = {
        tokens: {t.choice for t in audience.journal.trials if t.subject is Subject.LAYER and t.tokens == tokens}
        for tokens in late
    }
    first_winners = {event.entry.tokens: event.entry.plan for event in reversed(audience.of(events.TokenDone))}
    assert set(first_winners) == set(result.entries)
    for tokens in late:
        below = max(count for count in anchors(TOKENS) if count < tokens)
        if below * 8 >= tokens:
            assert without_smem(first_winners[below]) in timed[tokens]


def without_smem(plan):
    return replace(plan, gate_up=replace(plan.gate_up, smem_size=None), down=replace(plan.down, smem_size=None))


class SteppingClock:
    """A clock that moves a little at every look: time passes without waiting."""

    def __init__(self, step_s):
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self):
        self.now_s += self.step_s
        return self.now_s


def test_a_small_budget_still_gives_every_token_count_an_entry_and_says_so(fake_backend, tmp_path):
    budget = Budget(60.0, SteppingClock(0.3))
    result, audience = run(fake_backend(), tmp_path, budget)
    assert tuple(result.entries) == TOKENS
    assert result.stopped_early
    assert audience.of(events.Warned)
    assert all(entry.baseline_us is not None for entry in result.entries.values())


@pytest.mark.parametrize("step_s", [1.0, 100.0], ids=["short", "spent-at-once"])
def test_a_budget_that_ends_first_leaves_counts_out_and_names_them(fake_backend, tmp_path, step_s):
    result, audience = run(fake_backend(), tmp_path, Budget(60.0, SteppingClock(step_s)))
    assert result.stopped_early
    left_out = [tokens for tokens in TOKENS if tokens not in result.entries]
    assert 1 <= len(result.entries) < len(TOKENS)
    named = ", ".join(map(str, left_out))
    assert f"no time was left for {named} tokens, which get no new entry" in [
        warned.text for warned in audience.of(events.Warned)
    ]
    serves = [entry.serves for entry in result.entries.values()]
    assert serves[0][0] == 1
    assert all(one[1] + 1 == other[0] for one, other in pairwise(serves))
    assert len(audience.of(events.TokenStarted)) == len(result.entries)


def test_counters_are_prepared_while_the_last_token_counts_are_tuned(fake_backend, tmp_path):
    backend = fake_backend()
    prepared = []
    backend.prepare_counters = lambda: prepared.append(len(backend.opened))
    run(backend, tmp_path)
    surveyed = len(backend.opened) - len(TOKENS)
    assert prepared == [surveyed + opened for opened in (2, 3, 4, 5, 6)]  # of seven: as many were opened before
    assert backend.calls["counters"] == 1


def test_counters_replace_the_winners_figures_and_are_kept_as_trials(fake_backend, tmp_path):
    from moetune.engine.backend import LayerFigures

    counted = LayerFigures(
        flops_per_byte=Figure(16.0, Source.COUNTER),
        bandwidth_gbps=Figure(4100.0, Source.COUNTER),
        issue_efficiency=Figure(0.2, Source.COUNTER),
    )
    missing = Failed(FailureKind.RESOURCES, "ncu did not see this launch")
    result, audience = run(fake_backend(counters=lambda plans: dict.fromkeys(plans, counted) | {64: missing}), tmp_path)
    assert result.entries[1].bandwidth_gbps == {"value": 4100.0, "source": "counter"}
    assert result.entries[64].bandwidth_gbps["source"] == "unavailable"
    assert audience.tables[-1][1].issue_efficiency["source"] == "counter"
    assert [warned.text for warned in audience.of(events.Warned)] == [
        "no hardware counters for 1 of 7 entries: ncu did not see this launch"
    ]
    last = {trial.tokens: trial for trial in audience.journal.trials if trial.stage is Stage.FINAL}[1]
    assert isinstance(last.outcome, Measured)
    assert last.outcome.bandwidth_gbps.source is Source.COUNTER


def test_ctrl_c_passes_through_and_leaves_what_was_done(fake_backend, tmp_path):
    def stop(tokens):
        if backend.opened.count(tokens) == 2 and tokens == 512:
            raise KeyboardInterrupt

    audience, backend = Audience(), fake_backend(open=stop)
    with pytest.raises(KeyboardInterrupt):
        run(backend, tmp_path, audience=audience)
    assert set(audience.tables[-1]) < set(TOKENS)
    assert audience.journal.trials


def test_events_tell_the_whole_story(fake_backend, tmp_path):
    _, audience = run(fake_backend(), tmp_path)
    counts = Counter(type(event) for event in audience.events)
    assert counts[events.TokenStarted] == len(TOKENS)
    assert counts[events.TokenDone] == len(TOKENS)
    assert 0 < counts[events.SurveyStarted] <= len(TOKENS)
    assert counts[events.SpaceReady] == len(Role)
    assert counts[events.TrialEnded] == len(audience.journal.trials)
    compiled = audience.of(events.CompileProgress)
    assert compiled[0].done == 0 < compiled[0].total
    assert any(event.done == event.total for event in compiled)


def test_the_ladder_is_tuned_from_five_counts_that_span_it():
    ladder = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    assert anchors(ladder) == [1, 16, 64, 1024, 16384]
    assert sorted(order(ladder)) == list(ladder)
    assert order(ladder)[:5] == anchors(ladder)
    assert anchors((4, 1)) == [1, 4]


def test_the_budget_decides_how_many_kernels_are_compiled():
    assert 150 <= affordable_kernels(60.0, 15) < affordable_kernels(240.0, 15)
    assert affordable_kernels(10.0, 15) == 48
    assert affordable_kernels(None, 1) == affordable_kernels(inf, 15) == 210


def cost(total_s, opening_s=0.0, least_s=1.0):
    return CountCost(
        opening_s=opening_s,
        gate_up_s=0.6 * total_s,
        down_s=0.3 * total_s,
        ending_s=0.1 * total_s,
        down_ending_s=0.03 * total_s,
        finals_s=0.1 * total_s,
        least_s=least_s,
        shortest_s=0.2 * total_s,
    )


def test_a_count_borrows_what_the_later_ones_will_not_need():
    budget = budget_of(100.0, lambda: 0.0)
    allowance = budget.allow([cost(10.0), cost(20.0, opening_s=2.0)], reserve_s=15.0)
    assert allowance.deadline.left_s == pytest.approx(100.0 - 15.0 - CAUTION * 22.0)
    assert allowance.races
    assert allowance.gate_up_deadline.at_s < allowance.down_deadline.at_s < allowance.deadline.at_s


def test_scarce_time_is_shared_and_every_count_keeps_its_least():
    now = [0.0]
    budget = budget_of(20.0, lambda: now[0])
    costs = [cost(41.0), cost(21.0)]
    first = budget.allow(costs, reserve_s=0.0)
    assert first.deadline.left_s == pytest.approx(1.0 + 18.0 * 40 / 60)
    now[0] = first.deadline.at_s
    assert budget.allow(costs[1:], reserve_s=0.0).deadline.left_s == pytest.approx(1.0 + 18.0 * 20 / 60)
    now[0] = 21.5
    late = budget.allow(costs[1:], reserve_s=0.0)
    assert late.deadline.left_s < 1.0
    assert not late.races


def test_no_limit_means_no_deadline():
    allowance = Budget(None).allow([cost(1e9), cost(1e9)], reserve_s=0.0)
    assert allowance.deadline.left_s == allowance.gate_up_deadline.left_s == inf
    assert allowance.races


def test_polish_goes_where_the_best_configs_are_rare():
    ladder = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    shared = polish_by_count({tokens: tokens / 4 for tokens in ladder}, 72)
    assert sum(shared.values()) <= 72
    assert shared[1024] == shared[16384] > shared[4096] == shared[256] >= 4
    assert shared[16384] > shared[1] >= 8
    assert shared[2] == shared[128] == 0
    few = polish_by_count({tokens: tokens / 4 for tokens in ladder}, 10)
    assert {tokens for tokens, kernels in few.items() if kernels} == {1024, 16384}
    assert set(polish_by_count({1: 1.0, 2: 2.0}, 1).values()) == {0}


def run_between(fake_backend, tmp_path, us_at_32):
    """Sweep 16 and 64 tokens and look between them; ``us_at_32(plan, entries)`` is the time of a layer there."""
    audience = Audience()

    def layer(plan, rounds, tokens):
        entries = audience.tables[-1] if audience.tables else {}
        return measured(us_at_32(plan, entries), samples=rounds) if tokens == 32 and 32 not in entries else None

    return run(fake_backend(layer=layer), tmp_path, audience=audience, tokens=(16, 64), probes=1)


def test_between_two_entries_the_faster_neighbour_serves(fake_backend, tmp_path):
    result, audience = run_between(
        fake_backend, tmp_path, lambda plan, entries: 10.0 - 5.0 * (plan == entries[64].plan)
    )
    assert result.probes == (events.GapProbed(32, 64, 0.0),)
    assert audience.of(events.GapProbed) == list(result.probes)
    assert tuple(result.entries) == (16, 64)
    assert (result.entries[16].serves[1], result.entries[64].serves[0]) == (22, 23)


def test_a_count_where_both_neighbours_lose_becomes_an_entry(fake_backend, tmp_path):
    def us_at_32(plan, entries):
        return 10.0 if plan in (entries[16].plan, entries[64].plan) else 8.0

    result, audience = run_between(fake_backend, tmp_path, us_at_32)
    assert result.probes == (events.GapProbed(32, 16, pytest.approx(0.25), is_tuned=True),)
    assert tuple(result.entries) == (16, 32, 64)
    assert audience.of(events.TokenDone)[-1].entry.tokens == 32
    assert result.entries[16].serves[1] + 1 == result.entries[32].serves[0] <= 32


def test_nothing_is_timed_between_entries_that_nobody_asked_about(fake_backend, tmp_path):
    backend = fake_backend()
    result, _ = run(backend, tmp_path, tokens=(16, 64))
    assert result.probes == ()
    assert 32 not in backend.opened
