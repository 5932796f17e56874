from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import fields, replace

import pytest

from moetune.space import Limits, candidates, reason_class, recorded_space, sensible_block_ms
from moetune.space.enumerate import Ground, enumerate_configs
from moetune.space.occupancy import register_caps
from moetune.space.pool import Pool
from moetune.space.prior import Problem, predict
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.shape import MoEShape

MIXTRAL = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
QWEN = MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8)
ODD = MoEShape(hidden=97, inter=47, local_experts=5, top_k=2)
H200 = TARGETS["sm_90"]
LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [MIXTRAL, QWEN, ODD], ids=lambda shape: shape.key)
def test_every_candidate_can_run_on_every_target(shape, target, role):
    device = TARGETS[target]
    space = candidates(shape, device, role, LADDER, limit=60)
    assert space.configs
    assert len(set(space.configs)) == len(space.configs) <= 60
    assert {config.why_not(device, shape, role) for config in space.configs} == {None}


def test_what_cannot_run_is_counted_by_reason_without_its_numbers():
    space = candidates(MIXTRAL, H200, Role.GATE_UP, (4096,), limit=10)
    tiles = 3 * 3 * 5 * 4 * 5  # structures, block_m, n, k, stages
    caps = sum(1 + len(register_caps(32 * warps)) for warps in (2, 4, 8))  # none, then each cap, at every warp count
    assert sum(space.removed.values()) + space.legal == tiles * caps
    assert space.removed["needs N B of shared memory, the limit is N B"] > 0
    assert not any(character.isdigit() for reason in space.removed for character in reason)
    assert reason_class("takes no K tail: 2880 is no multiple of 128") == "takes no K tail: N is no multiple of N"


def test_a_shape_with_a_k_tail_keeps_only_pointer_loads():
    space = candidates(ODD, H200, Role.DOWN, (1, 64), limit=1000)
    assert {config.structure for config in space.configs} == {Structure.GATHER}


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_any_prefix_of_the_compile_order_is_a_mix(role):
    space = candidates(MIXTRAL, H200, role, LADDER, limit=160)
    for length in (24, 80, 160):
        prefix = space.configs[:length]
        assert {Structure.GATHER, Structure.TMA} <= {config.structure for config in prefix}
        heights = {config.block_m for config in prefix}
        assert {16, 32, 64, 128} <= heights
        assert (256 in heights) or role is Role.GATE_UP  # two accumulators of 256 rows never paid
    assert len({config.num_warps for config in space.configs}) == 3
    assert len({config.prefetch_distance for config in space.configs}) >= 3


@pytest.mark.parametrize(
    ("shape", "tokens", "expected"),
    [
        pytest.param(MIXTRAL, 1, (16, 32, 64), id="one-row-per-expert"),
        pytest.param(MIXTRAL, 256, (32, 64, 128), id="64-rows"),
        pytest.param(MIXTRAL, 512, (64, 128), id="128-rows"),
        pytest.param(MIXTRAL, 16384, (64, 128, 256), id="4096-rows"),
        pytest.param(QWEN, 256, (16, 32, 64), id="16-rows-over-128-experts"),
        pytest.param(replace(MIXTRAL, experts=64), 256, (16, 32, 64), id="rows-follow-the-experts-of-all-ranks"),
    ],
)
def test_tile_heights_follow_the_rows_per_expert(shape, tokens, expected):
    assert sensible_block_ms(shape, tokens) == expected


def test_decode_alone_compiles_no_tall_tiles():
    space = candidates(MIXTRAL, H200, Role.DOWN, (1, 2, 4), limit=200)
    assert max(config.block_m for config in space.configs) == 64
    assert {config.group_m for config in space.configs} == {1}


def test_the_largest_tiles_are_guessed_to_win_at_many_rows():
    space = candidates(MIXTRAL, H200, Role.DOWN, LADDER, limit=160)
    tall = [config for config in space.configs if config.block_m in sensible_block_ms(MIXTRAL, 16384)]
    first = space.by_promise(tall, 16384)[0]
    assert first.block_m * first.block_n == 128 * 256


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_neighbours_are_legal_and_differ_in_one_choice(role):
    space = candidates(MIXTRAL, H200, role, LADDER, limit=160)
    for config in space.configs[:40]:
        found = space.neighbours(config, 16384)
        assert len(set(found)) == len(found) > 0
        for other in found:
            changed = [
                field.name for field in fields(config) if getattr(config, field.name) != getattr(other, field.name)
            ]
            assert len(changed) == 1
            assert other.block_m == config.block_m
            assert other.why_not(H200, MIXTRAL, role) is None


@pytest.mark.parametrize("shape", [MIXTRAL, QWEN], ids=lambda shape: shape.key)
def test_the_needles_of_many_rows_are_candidates_with_several_groupings(shape):
    """What won at 1024 to 16384 tokens in recorded sweeps of an H200: tiles, warps, distance, and any group_m.

    Twelve steps are all that a tile of QWEN's down GEMM has: there two blocks of 128x128 won over one of 128x256.
    """
    grouped = {Role.GATE_UP: (64, 256, 8, 3), Role.DOWN: (128, 128, 8, 3) if shape is QWEN else (128, 256, 8, 4)}
    needles = {
        Role.GATE_UP: [(64, 256, 8, 3), (128, 128, 8, 4), (128, 128, 8, 3), (64, 128, 4, 4)],
        Role.DOWN: [(128, 256, 8, 4), (128, 256, 8, 3), (256, 128, 8, 4), (64, 256, 4, 4)],
    }
    for role, tiles in needles.items():
        space = candidates(shape, H200, role, LADDER, limit=135)
        groupings: dict[tuple[int, ...], set[int]] = {}
        for config in space.configs:
            if config.structure is Structure.TMA and config.block_k == 64:
                tile = config.block_m, config.block_n, config.num_warps, config.prefetch_distance
                groupings.setdefault(tile, set()).add(config.group_m)
        assert set(tiles) <= set(groupings)
        assert groupings[grouped[role]] == {4, 8, 16, 32}
    permuted = candidates(shape, H200, Role.GATE_UP, LADDER, limit=135).configs
    assert {c.group_m for c in permuted if c.structure is Structure.TMA_PERMUTE and c.block_n >= 128} >= {4, 8, 16, 32}


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
@pytest.mark.parametrize("shape", [MIXTRAL, QWEN], ids=lambda shape: shape.key)
def test_low_tiles_come_in_every_width_and_warp_count_because_memory_bound_guesses_are_poor(shape, role):
    space = candidates(shape, H200, role, LADDER, limit=135)
    low = [config for config in space.configs if config.block_m == 16]
    assert len(low) >= 24
    assert {32, 64, 128, 256} <= {config.block_n for config in low}
    assert {config.num_warps for config in low} == {2, 4, 8}
    assert {64, 128} <= {config.block_k for config in low}


def test_decode_alone_gets_no_groupings():
    space = candidates(MIXTRAL, H200, Role.DOWN, (1, 64), limit=135)
    assert {config.group_m for config in space.configs} == {1}


def test_row_grouping_is_only_varied_where_an_expert_has_several_row_tiles():
    space = candidates(MIXTRAL, H200, Role.DOWN, LADDER, limit=160)
    config = next(config for config in space.configs if config.block_m == 128)
    at_decode, at_prefill = ({other.group_m for other in space.neighbours(config, tokens)} for tokens in (1, 16384))
    assert at_decode == {config.group_m}
    assert at_prefill == {1, 4, 8, 16, 32}


def test_a_replay_leaves_its_recorded_candidates_nowhere_to_go():
    recorded = candidates(MIXTRAL, H200, Role.DOWN, LADDER, limit=40).configs
    space = recorded_space(MIXTRAL, H200, Role.DOWN, LADDER, recorded)
    assert space.configs == recorded
    assert all(set(space.neighbours(config, 4096)) <= set(recorded) for config in recorded)


def test_the_space_is_the_same_every_time():
    first, second = (candidates(QWEN, H200, Role.GATE_UP, LADDER, limit=120) for _ in range(2))
    assert first.configs == second.configs


# what makes it fast, and may not be seen


@pytest.fixture
def fresh_spaces():
    from moetune.space import space

    space._free_candidates.cache_clear()
    yield space._free_candidates
    space._free_candidates.cache_clear()


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
@pytest.mark.parametrize("target", TARGETS)
def test_a_pool_is_guessed_to_the_last_bit_as_its_configs_one_by_one(target, role):
    for shape in (MIXTRAL, QWEN, ODD):
        problem = Problem(shape, TARGETS[target], role)
        configs = enumerate_configs(Ground(problem, LADDER)).configs[::7]
        pool = Pool(configs, problem)
        tall = pool.where(lambda config: config.block_m >= 64)
        for tokens in (1, 3, 64, 300, 16384):
            assert pool.times(tokens) == [predict(config, problem, tokens) for config in configs]
            assert tall.times(tokens) == [predict(config, problem, tokens) for config in tall.configs]
        assert all(config.block_m >= 64 for config in tall.configs)
    assert Pool((), problem).times(1) == []


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_a_tile_is_asked_once_whether_it_can_run_and_not_once_per_register_cap(role, monkeypatch):
    asked = Counter()
    why_not = MoEKernelConfig.why_not
    monkeypatch.setattr(MoEKernelConfig, "why_not", lambda self, *on: asked.update(["all"]) or why_not(self, *on))
    found = enumerate_configs(Ground(Problem(MIXTRAL, H200, role), LADDER))
    tiles = (3 if role is Role.GATE_UP else 2) * 5 * 5 * 4 * 3 * 5  # structures, block_m, n, k, warps, stages
    assert asked["all"] == tiles
    assert found.enumerated > 6 * tiles
    for config in found.configs[::11]:
        assert Ground(Problem(MIXTRAL, H200, role), LADDER).why_not(config) is None  # caps and all


def test_the_cap_rule_of_a_tile_is_the_rule_of_the_config_with_that_cap():
    ground = Ground(Problem(MIXTRAL, H200, Role.GATE_UP), LADDER)
    answers = Counter()
    for base in [config for config in enumerate_configs(ground).configs if config.max_registers is None][::5]:
        for cap in ground.caps(base):
            reason = ground.why_not(replace(base, max_registers=cap))
            assert ground.why_not_cap(base, cap) == reason
            answers[reason and reason_class(reason)] += 1
    assert len(answers) == 3  # it may run, the cap is under the accumulators, the room stays empty


def test_a_space_asked_for_again_is_not_enumerated_again_and_no_caller_can_change_it(fresh_spaces):
    asked = QWEN, H200, Role.DOWN, LADDER, 31
    first = candidates(*asked)
    assert fresh_spaces.cache_info().misses == 1
    legal, removed = first.legal, dict(first.removed)
    first.removed.clear()
    first.outside["mine"] += 1
    first.ceilings.clear()
    with pytest.raises(TypeError):
        first.firsts[first.configs[0]] = first.configs[1]
    first.neighbours(first.configs[0], 64).clear()
    second = candidates(*asked)
    assert fresh_spaces.cache_info().hits == 1
    assert (second.legal, dict(second.removed), second.outside.total()) == (legal, removed, 0)
    assert second.ceilings.total() == legal
    assert second.neighbours(second.configs[0], 64) == first.neighbours(first.configs[0], 64) != []
    candidates(QWEN, H200, Role.DOWN, LADDER[1:], 31)
    assert fresh_spaces.cache_info().misses == 2


def test_limits_are_never_answered_from_a_space_without_limits(fresh_spaces):
    free = candidates(QWEN, H200, Role.DOWN, LADDER, 31)
    limited = candidates(QWEN, H200, Role.DOWN, LADDER, 31, limits=Limits(structures=(Structure.GATHER,)))
    assert {config.structure for config in limited.configs} == {Structure.GATHER} != {c.structure for c in free.configs}


def test_both_gemms_share_their_configs_and_a_hash_is_not_carried_to_another_process():
    spaces = [candidates(MIXTRAL, H200, role, LADDER, 100_000) for role in Role]
    known = {config: config for config in spaces[0].configs}
    shared = [config for config in spaces[1].configs if config in known]
    assert len(shared) > 1000
    assert all(known[config] is config for config in shared)
    hash(shared[0])
    again = pickle.loads(pickle.dumps(shared[0]))
    assert not hasattr(again, "_hash")
    assert (again, hash(again)) == (shared[0], hash(shared[0]))
