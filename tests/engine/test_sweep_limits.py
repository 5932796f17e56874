"""A sweep under a user's limits: what may win, what is timed, what is said, and what another sweep's trials are worth."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from moetune.engine import events
from moetune.engine.budget import Budget
from moetune.errors import RunError, UsageError
from moetune.outcome import Compiled, Failed, FailureKind, Stage, Subject
from moetune.space import Limits, SpaceFile, candidates
from moetune.space.axes import Axes
from moetune.space.limits import Allowed
from moetune.store import Provenance, Store, load_recording
from moetune.tuning import Bed, SweepRequest, replay_bed, run_on
from moetune_kernels.config import Role, Structure
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.shape import MoEShape
from moetune_kernels.table import TunedTable

SHAPE = MoEShape(hidden=1024, inter=512, local_experts=8, top_k=2)
TOKENS = (1, 8, 64, 512, 4096)
GATHER = Limits(structures=(Structure.GATHER,))


SMALLER = "smaller kernels are compiled"


def candidates_of(backend, role, limits):
    return candidates(SHAPE, backend.device, role, TOKENS, 24, limits).configs


def legal_of(backend, role, limits):
    return candidates(SHAPE, backend.device, role, TOKENS, 24, limits).firsts.values()


def sweep_on(backend, folder, on_event=lambda _: None, budget=None, **changes):
    made_by = Provenance(
        backend=backend.name,
        shape=SHAPE,
        device=backend.device,
        kernels_sha256="0" * 64,
        triton="3.6.0",
        torch="2.11.0",
        driver="580.1",
    )
    bed = Bed(backend, made_by, "2026-12-01T08:00:00+00:00", folder / "tables", folder / "trials.sqlite")
    request = replace(SweepRequest(shape=SHAPE, tokens=TOKENS, budget_s=30.0), **changes)
    return run_on(bed, request, budget or Budget(None), on_event)


def plans_of(table):
    return {tokens: entry.plan for tokens, entry in table.entries.items()}


def no_ceiling(config):
    return replace(config, smem_size=None)


def structures_of(table):
    return {plan.config(role).structure for plan in plans_of(table).values() for role in Role}


def smem_by_depth(role, config):
    """Report 10,000 B per stage and 40 registers per warp or the cap: ceilings cut after the compiler, not before it."""
    return Compiled(
        registers=min(40 * config.num_warps, config.max_registers or 255),
        spills=0,
        smem_bytes=10_000 * config.prefetch_distance,
        block_size=config.block_size,
    )


def said(seen, kind):
    return [event for event in seen if isinstance(event, kind)]


def test_only_the_structures_that_are_allowed_are_raced_and_win(fake_backend, tmp_path):
    free = sweep_on(fake_backend(), tmp_path / "free")
    assert structures_of(free.table) - {Structure.GATHER}  # else the limit below would show nothing
    backend, seen = fake_backend(), []
    result = sweep_on(backend, tmp_path, seen.append, limits=GATHER)
    assert structures_of(result.table) == {Structure.GATHER}
    assert {config.structure for _, config, _ in backend.launched} == {Structure.GATHER}
    assert tuple(result.table.entries) == TOKENS
    ready = said(seen, events.SpaceReady)
    assert all(space.outside["outside --structures gather"] > 0 for space in ready)
    assert result.removed["outside --structures gather"] == sum(space.outside.total() for space in ready)


@pytest.mark.parametrize(
    ("limits", "keeps"),
    [
        (Limits(max_smem=30_000), lambda config: config.smem_size <= 30_000),
        (Limits(max_registers=160), lambda config: min(40 * config.num_warps, config.max_registers or 255) <= 160),
    ],
    ids=["max-smem", "max-registers"],
)
def test_what_the_compiler_reports_above_a_ceiling_is_neither_timed_nor_written(fake_backend, tmp_path, limits, keeps):
    backend, seen = fake_backend(compile=smem_by_depth), []
    result = sweep_on(backend, tmp_path, seen.append, limits=limits)
    assert tuple(result.table.entries) == TOKENS
    for plan in plans_of(result.table).values():
        for role in Role:
            assert keeps(plan.config(role))
            assert plan.config(role).smem_size == 10_000 * plan.config(role).prefetch_distance  # canonical
    canonical = [replace(one, smem_size=10_000 * one.prefetch_distance) for _, one, _ in backend.launched]
    assert canonical
    assert all(keeps(config) for config in canonical)
    compiled = said(seen, events.SpaceCompiled)
    assert {space.role for space in compiled} == set(Role)
    assert all(space.inside > 0 for space in compiled)
    assert limits.max_smem is None or all(sum(space.outside.values()) > 0 for space in compiled)


def test_every_screened_trial_carries_the_shared_memory_that_the_compiler_reported(fake_backend, tmp_path):
    backend = fake_backend(compile=smem_by_depth)
    result = sweep_on(backend, tmp_path, limits=Limits(max_smem=30_000))
    with Store(result.store_path) as store:
        rows = [row.trial for row in store.rows(SHAPE, backend.device) if row.trial.stage is Stage.SCREEN]
    kernels = [trial for trial in rows if trial.subject in (Subject.GATE_UP, Subject.DOWN)]
    assert kernels
    assert all(trial.compiled.smem_bytes == 10_000 * trial.choice.prefetch_distance for trial in kernels)
    assert not any("over --max" in getattr(trial.outcome, "reason", "") for trial in rows)


def test_a_default_plan_outside_the_limits_is_timed_and_never_wins(fake_backend, tmp_path):
    default = heuristic_plan(SHAPE, 8, fake_backend().device)
    other = Structure.TMA if default.gate_up.structure is Structure.GATHER else Structure.GATHER

    def default_is_fastest(role, config, tokens):
        return 5.0 if config == default.config(role) else None

    backend, seen = fake_backend(kernel_us=default_is_fastest), []
    free = sweep_on(backend, tmp_path / "free", tokens=(8,))
    assert no_ceiling(free.table.entries[8].plan.gate_up) == default.gate_up
    result = sweep_on(backend, tmp_path, seen.append, tokens=(8,), limits=Limits(structures=(other,)))
    entry = result.table.entries[8]
    assert structures_of(result.table) == {other}
    assert entry.baseline_us == pytest.approx(14.0)
    assert entry.median_us > entry.baseline_us
    warned = next(event.text for event in said(seen, events.Warned) if "the limits cost" in event.text)
    assert warned.startswith("8 tokens: the limits cost ")
    assert f"which is outside: gate_up: outside --structures {other.value}" in warned


def test_a_count_whose_kernels_inside_all_fail_has_no_entry_and_says_that_the_default_is_outside(
    fake_backend, tmp_path
):
    default = heuristic_plan(SHAPE, 64, fake_backend().device)
    other = Structure.TMA if default.gate_up.structure is Structure.GATHER else Structure.GATHER
    wrong = Failed(FailureKind.WRONG, "off by one")

    def wrong_kernel(role, config):
        return wrong if backend.tokens == 64 and config.structure is other else None

    def wrong_layer(plan):
        return wrong_kernel(Role.DOWN, plan.down)

    backend, seen = fake_backend(verify_kernel=wrong_kernel, verify_layer=wrong_layer), []
    result = sweep_on(backend, tmp_path, seen.append, tokens=(8, 64), limits=Limits(structures=(other,)))
    assert tuple(result.table.entries) == (8,)
    (failed,) = said(seen, events.TokenFailed)
    assert failed.tokens == 64
    assert f"the default plan is outside: gate_up: outside --structures {other.value}" in failed.reason
    with pytest.raises(RunError, match=f"inside --structures {other.value}"):
        sweep_on(backend, tmp_path / "alone", tokens=(64,), limits=Limits(structures=(other,)))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(max_smem=100), r"no config is left for gate_up: over --max-smem 100: [\d,]+ removed"),
        (Limits(max_smem=9_000), r"no compiled kernel is left for gate_up and down: gate_up: over --max-smem 9000: "),
    ],
    ids=["before-compiling", "after-compiling"],
)
def test_limits_that_leave_nothing_end_the_sweep_before_anything_is_timed(fake_backend, tmp_path, limits, message):
    backend = fake_backend(compile=smem_by_depth)
    with pytest.raises(UsageError, match=message):
        sweep_on(backend, tmp_path, limits=limits)
    assert backend.calls["first_launch"] == backend.calls["time_layers"] == 0
    assert not (tmp_path / "tables").exists()


def is_small(config):
    return config.block_n == 32 and config.block_k == 64 and config.num_warps == 8


def fits_small_tiles(first_round, **over):
    """What the compiler says where of all but a first round only tiles of few columns and a short step fit."""

    def says(role, config):
        fits = is_small(config) and config not in first_round
        return smem_by_depth(role, config) if fits else replace(smem_by_depth(role, config), **over)

    return says


@pytest.mark.parametrize(
    ("limits", "over"),
    [
        pytest.param(Limits(max_registers=96), {"registers": 97}, id="they-take-too-many-registers"),
        pytest.param(Limits(max_registers=96), {"spills": 40}, id="the-cap-makes-them-spill"),
        pytest.param(Limits(max_smem=40_000), {"smem_bytes": 40_001}, id="they-take-too-much-shared-memory"),
    ],
)
def test_a_first_round_outside_the_limits_is_followed_by_smaller_kernels(fake_backend, tmp_path, limits, over):
    first_round = {config for role in Role for config in candidates_of(fake_backend(), role, limits)}
    backend, seen = fake_backend(compile=fits_small_tiles(first_round, **over)), []
    result = sweep_on(backend, tmp_path, seen.append, limits=limits)
    assert tuple(result.table.entries) == TOKENS
    for plan in plans_of(result.table).values():
        assert all(is_small(plan.config(role)) for role in Role)
    told = [event.text for event in said(seen, events.Warned) if "smaller kernels are compiled" in event.text]
    assert told == [f"none of the first kernels is inside {limits.text} at 1, 8, 64, 512, 4096 tokens: {SMALLER}"]
    legal = sum(space.legal for space in said(seen, events.SpaceReady))
    assert backend.calls["compile"] < legal / 4  # those that take least came first


def test_limits_are_refused_when_all_that_could_keep_to_them_was_compiled(fake_backend, tmp_path):
    limits = Limits(max_registers=96)
    backend = fake_backend(compile=lambda role, config: replace(smem_by_depth(role, config), registers=97))
    with pytest.raises(UsageError, match=r"gate_up: over --max-registers 96: [\d,]+ removed; .*; widen the limits"):
        sweep_on(backend, tmp_path, limits=limits)
    tiles = {replace(config, max_registers=None) for role in Role for config in legal_of(backend, role, limits)}
    assert backend.calls["compile"] >= 2 * len(tiles)
    assert backend.calls["first_launch"] == 0


def test_a_budget_that_ends_before_a_kernel_inside_was_found_refuses_no_limit(virtual_h200, tmp_path):
    backend = virtual_h200(SHAPE, compile=lambda role, config: replace(smem_by_depth(role, config), registers=97))
    with pytest.raises(RunError, match=r"and the budget left [\d,]+ others untried; widen either"):
        sweep_on(backend, tmp_path, budget=Budget(30.0, backend.clock), limits=Limits(max_registers=96))
    assert backend.now_s <= 30.0


def test_a_count_without_a_kernel_inside_gets_one_where_others_have_some(fake_backend, tmp_path):
    tall: set[Role] = set()  # GEMMs that have a tall kernel inside before anything is timed

    def says(role, config):
        fits = config.block_m == 16 or (config.block_n == 32 and config.block_k == 64)
        if fits and config.block_m >= 64 and not backend.opened:
            tall.add(role)
        return replace(smem_by_depth(role, config), registers=90 if fits else 97)

    backend, seen = fake_backend(compile=says), []
    result = sweep_on(backend, tmp_path, seen.append, limits=Limits(max_registers=96))
    assert tuple(result.table.entries) == TOKENS
    assert tall == set(Role)
    assert "at 512, 4096 tokens" in next(event.text for event in said(seen, events.Warned) if SMALLER in event.text)


def test_a_second_sweep_under_the_same_limits_keeps_what_the_first_one_found(fake_backend, tmp_path):
    named = {"max_registers": (None,), "num_warps": (2, 4)}
    file = SpaceFile(name="s.json", allowed=dict.fromkeys(Role, Allowed(axes=Axes(named))))
    limits = Limits(max_registers=160, max_smem=50_000, file=file)
    first = sweep_on(fake_backend(compile=smem_by_depth), tmp_path, tokens=(1, 512), limits=limits)
    assert tuple(first.table.entries) == (1, 512)  # uncapped: only the store knows that they take at most 160
    result = sweep_on(fake_backend(compile=smem_by_depth), tmp_path, tokens=(8,), limits=limits)
    assert tuple(result.table.entries) == (1, 8, 512)


def test_a_count_that_does_not_fit_says_so_and_nothing_of_limits(fake_backend, tmp_path):
    def no_room(tokens):
        return Failed(FailureKind.RESOURCES, "out of memory") if tokens == 64 else None

    seen = []
    sweep_on(fake_backend(open=no_room), tmp_path, seen.append, tokens=(8, 64), limits=GATHER)
    (failed,) = said(seen, events.TokenFailed)
    assert (failed.tokens, failed.reason) == (64, "out of memory")


def test_heights_that_no_compiled_kernels_share_end_the_sweep(fake_backend, tmp_path):
    def tall_only_in_down(role, config):
        fits = (config.block_m >= 64) == (role is Role.DOWN)
        return replace(smem_by_depth(role, config), smem_bytes=20_000 if fits else 60_000)

    backend = fake_backend(compile=tall_only_in_down)
    with pytest.raises(UsageError, match=r"no token count has a block_m left that both GEMMs share: gate_up keeps "):
        sweep_on(backend, tmp_path, limits=Limits(max_smem=50_000))


def test_polish_stays_inside_a_space_file(fake_backend, tmp_path):
    named = {"num_warps": (4,), "prefetch_distance": (2, 3), "max_registers": (None, 168)}
    file = SpaceFile(name="s.json", allowed=dict.fromkeys(Role, Allowed(axes=Axes(named))))
    backend = fake_backend()
    result = sweep_on(backend, tmp_path, limits=Limits(file=file))
    tried = {config for _, config, _ in backend.launched}
    assert all(getattr(config, name) in values for config in tried for name, values in named.items())
    assert len(tried) > 20
    assert {config.max_registers for config in tried} == {None, 168}
    assert all(plan.gate_up.num_warps == 4 for plan in plans_of(result.table).values())


def test_no_kernel_is_launched_twice_under_two_names(fake_backend, tmp_path):
    backend = fake_backend()
    sweep_on(backend, tmp_path)
    firsts = Counter(backend.launched)
    assert max(firsts.values()) == 1
    assert all(config.smem_size is None for _, config, _ in firsts)


def test_trials_of_a_free_sweep_serve_a_limited_one_only_where_they_hold(fake_backend, tmp_path):
    def tma_is_much_faster(role, config, tokens):
        return 100.0 + config.block_n / 64 if config.structure is Structure.GATHER else 10.0

    first = fake_backend(kernel_us=tma_is_much_faster)
    sweep_on(first, tmp_path, tokens=(8,))
    with Store(tmp_path / "trials.sqlite") as store:
        slow = {
            (row.trial.subject.value, row.trial.choice)
            for row in store.rows(SHAPE, first.device)
            if isinstance(row.trial.outcome, Failed) and row.trial.outcome.kind is FailureKind.SLOW
        }
    assert slow
    second = fake_backend(kernel_us=tma_is_much_faster)
    result = sweep_on(second, tmp_path, tokens=(8,), limits=GATHER)
    again = {(role.value, config) for role, config, _ in second.launched}
    assert again & slow  # refused beside TMA, which is outside now
    assert structures_of(result.table) == {Structure.GATHER}
    unlimited = sweep_on(fake_backend(kernel_us=tma_is_much_faster), tmp_path / "alone", tokens=(8,), limits=GATHER)
    assert result.table.entries[8].median_us == pytest.approx(unlimited.table.entries[8].median_us, rel=0.05)
    third = fake_backend(kernel_us=tma_is_much_faster)
    whole = sweep_on(third, tmp_path, tokens=(8,))
    assert structures_of(whole.table) == {Structure.TMA} or Structure.TMA_PERMUTE in structures_of(whole.table)
    assert third.calls["first_launch"] < 0.2 * first.calls["first_launch"]


def test_entries_of_an_earlier_sweep_that_are_outside_leave_the_table(fake_backend, tmp_path):
    free = sweep_on(fake_backend(), tmp_path)
    limits = GATHER
    stay = {tokens for tokens, plan in plans_of(free.table).items() if limits.keep(plan)}
    assert stay != set(TOKENS)
    seen = []
    result = sweep_on(fake_backend(), tmp_path, seen.append, tokens=(8,), limits=limits)
    read = TunedTable.parse(result.table_path.read_bytes(), "the table")
    assert set(read.entries) == stay | {8}
    assert structures_of(read) == {Structure.GATHER}
    told = {event.text.split()[0] for event in said(seen, events.Warned) if "leaves the table" in event.text}
    assert told == {str(tokens) for tokens in set(TOKENS) - stay}


@pytest.mark.parametrize(
    "limits", [GATHER, Limits(max_smem=30_000), Limits(max_registers=160)], ids=lambda one: one.text
)
def test_a_replay_under_limits_keeps_them_and_times_nothing_else(fake_backend, tmp_path, limits):
    sweep_on(fake_backend(compile=smem_by_depth), tmp_path, limits=limits)
    sweep_on(fake_backend(compile=smem_by_depth), tmp_path, record=tmp_path / "tiny.jsonl.xz")
    recorded = load_recording(tmp_path / "tiny.jsonl.xz")
    request = SweepRequest(shape=SHAPE, tokens=TOKENS, out_dir=tmp_path / "replay", limits=limits)
    results = [run_on(replay_bed(recorded, request), request, Budget(None), lambda _: None) for _ in range(2)]
    assert results[0].table == results[1].table
    table = results[0].table
    assert table.entries
    for plan in plans_of(table).values():
        for role in Role:
            config = plan.config(role)
            assert limits.why_not_compiled(config, role, smem_by_depth(role, config)) is None


def test_a_replay_falls_back_to_sums_where_no_layer_inside_was_recorded(fake_backend, tmp_path):
    sweep_on(fake_backend(), tmp_path, limits=GATHER)
    sweep_on(fake_backend(), tmp_path, record=tmp_path / "tiny.jsonl.xz")
    recorded = load_recording(tmp_path / "tiny.jsonl.xz")
    others = tuple(t for t in recorded.trials if t.subject is not Subject.LAYER or not GATHER.keep(t.choice))
    assert {trial.subject for trial in others} >= {Subject.LAYER}
    request = SweepRequest(shape=SHAPE, tokens=TOKENS, out_dir=tmp_path / "replay", limits=GATHER)
    table = run_on(replay_bed(replace(recorded, trials=others), request), request, Budget(None), lambda _: None).table
    assert tuple(table.entries) == TOKENS
    assert structures_of(table) == {Structure.GATHER}


def test_the_limits_stand_in_the_command_of_table_and_recording(fake_backend, tmp_path):
    command = "moetune sweep --structures gather"
    result = sweep_on(fake_backend(), tmp_path, limits=GATHER, command=command, record=tmp_path / "tiny.jsonl.xz")
    assert result.table.command == command
    assert load_recording(tmp_path / "tiny.jsonl.xz").command == command
