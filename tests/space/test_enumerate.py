"""Properties of every space: what is counted adds up, what is kept can run, keeps the limits and stands for itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from moetune.space import Limits, SpaceFile, candidates
from moetune.space.axes import NAMES, Axes
from moetune.space.enumerate import Ground, enumerate_configs
from moetune.space.limits import NO_CEILING, Allowed
from moetune.space.occupancy import (
    STEADY_CAPS,
    blocks_by_registers,
    blocks_by_smem,
    register_caps,
    smem_ceiling,
    smem_ceilings,
)
from moetune.space.prior import Problem
from moetune_kernels.config import BARRIER_BYTES, MAXNREG_MARGIN, MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.shape import MoEShape

H200 = TARGETS["sm_90"]
SHAPES = (
    MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2),
    MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8),
    MoEShape(hidden=96, inter=64, local_experts=4, top_k=1),
    MoEShape(hidden=97, inter=47, local_experts=5, top_k=2),
)
CAPPED = MoEKernelConfig(
    structure=Structure.GATHER, block_m=64, block_n=64, block_k=64, max_registers=168, prefetch_distance=7
)


def file_of(axes=None, listed=None, smem_size=None, roles=tuple(Role)):
    allowed = Allowed(axes=None if axes is None else Axes(axes, smem_size), listed=listed or {})
    return SpaceFile(name="space.json", allowed=dict.fromkeys(roles, allowed))


def random_limits(random):
    """Return limits of every kind by chance, values outside the built-in axes among them."""
    choose = random.choice
    axes = {
        "structure": tuple(random.sample(list(Structure), choose((1, 2, 3)))),
        "block_m": choose(((16, 64), (64,), (32, 128, 256))),
        "block_n": choose(((16, 128), (64, 256))),
        "num_warps": choose(((1, 4), (8,), (4, 16))),
        "prefetch_distance": choose(((1, 3), (7, 8), (4,))),
        "max_registers": choose(((None, 168), (255, None), (96, 200))),
        "group_m": choose(((1, 8), (3,))),
    }
    named = {name: axes[name] for name in random.sample(list(axes), random.randint(1, 4))}
    listed = {CAPPED: NO_CEILING, replace(CAPPED, block_n=128): 65_536}
    return Limits(
        max_smem=choose((None, 49_152, 98_304)),
        max_registers=choose((None, 96, 128, 200)),
        structures=choose(((), (Structure.GATHER,), (Structure.GATHER, Structure.TMA))),
        file=choose(
            (None, file_of(named, smem_size=choose((None, 76_800))), file_of(named, listed), file_of(None, listed))
        ),
    )


def is_inside(config, role, limits, device, shape):
    """Whether a config keeps the limits, as far as can be said without a compiler; written apart from the code."""
    allowed = limits.allowed(role)
    needed = config.smem_estimate(device.sm, shape, role) - BARRIER_BYTES
    rules = [
        not limits.structures or config.structure in limits.structures,
        limits.max_registers is None or (config.max_registers or 0) <= limits.max_registers,
        limits.max_smem is None or needed <= limits.max_smem,
    ]
    if allowed is not None:
        in_axes = allowed.axes is not None and all(
            getattr(config, name) in values for name, values in allowed.axes.values.items()
        )
        rules.append(in_axes or config in allowed.listed)
    return all(rules)


@pytest.mark.parametrize("seed", range(16))
def test_counts_add_up_and_everything_kept_runs_inside_the_limits_once(seed):
    random = Random(seed)
    shape, device, role = random.choice(SHAPES), random.choice(list(TARGETS.values())), random.choice(list(Role))
    tokens = tuple(random.sample((1, 4, 16, 64, 300, 1024, 8192), random.randint(1, 4)))
    limits = random_limits(random)
    ground = Ground(Problem(shape, device, role), tokens, limits)
    found = enumerate_configs(ground)
    gone = found.removed.total() + found.outside.total() + found.duplicates
    assert found.enumerated == len(found.configs) + gone
    assert len(set(found.configs)) == len({ground.clamped(config) for config in found.configs}) == len(found.configs)
    for config in found.configs:
        assert config.why_not(device, shape, role) is None
        assert is_inside(config, role, limits, device, shape)
    free = enumerate_configs(Ground(Problem(shape, device, role), tokens))
    assert found.enumerated >= free.enumerated  # what a file leaves out is counted, not unseen


@pytest.mark.parametrize("seed", range(16))
def test_neither_candidates_nor_neighbours_leave_the_limits_or_repeat_a_config(seed):
    random = Random(100 + seed)
    shape, role = random.choice(SHAPES), random.choice(list(Role))
    tokens = (1, 64, 4096)
    limits = random_limits(random)
    space = candidates(shape, H200, role, tokens, limit=random.choice((7, 40, 100_000)), limits=limits)
    ground = Ground(Problem(shape, H200, role), tokens, limits)
    assert len(set(space.configs)) == len(space.configs) <= max(space.legal, 1)
    tried = list(space.configs)
    for config in space.configs[:15]:
        tried += space.neighbours(config, random.choice(tokens))
    for config in tried:
        assert config.why_not(H200, shape, role) is None
        assert is_inside(config, role, limits, H200, shape)
        assert config.smem_size is None
    assert len({ground.clamped(config) for config in tried}) == len(set(tried))  # none runs as another one does


def test_a_prefetch_distance_beyond_the_steps_is_a_duplicate_and_is_never_tried():
    shape = MoEShape(hidden=256, inter=128, local_experts=4, top_k=1)  # 2 steps of 128 in gate-up
    space = candidates(shape, H200, Role.GATE_UP, (64,), limit=100_000)
    assert space.duplicates > 0
    deep = [config for config in space.configs if config.block_k == 128]
    assert {config.prefetch_distance for config in deep} == {2}
    for config in deep[:20]:
        assert {other.prefetch_distance for other in space.neighbours(config, 64) if other.block_k == 128} <= {2}


def test_a_file_that_names_only_the_deep_distance_keeps_it():
    shape = MoEShape(hidden=256, inter=128, local_experts=4, top_k=1)
    named = {"prefetch_distance": (6,), "block_k": (128,)}
    space = candidates(shape, H200, Role.GATE_UP, (64,), limit=100_000, limits=Limits(file=file_of(named)))
    assert {(config.prefetch_distance, config.block_k) for config in space.configs} == {(6, 128)}


def test_two_listed_configs_that_differ_in_their_ceiling_alone_are_one():
    listed = {CAPPED: NO_CEILING}
    space = candidates(SHAPES[0], H200, Role.DOWN, (64,), limits=Limits(file=file_of(None, listed)))
    assert space.configs == (CAPPED,)


def test_row_grouping_that_one_tile_cannot_show_is_a_duplicate():
    limits = Limits(file=file_of({"group_m": (4, 1, 8), "structure": (Structure.GATHER,)}))
    few = candidates(SHAPES[0], H200, Role.DOWN, (16,), limit=100_000, limits=limits)
    many = candidates(SHAPES[0], H200, Role.DOWN, (4096,), limit=100_000, limits=limits)
    assert {config.group_m for config in few.configs} == {1}
    assert few.duplicates == 2 * few.legal
    assert {config.group_m for config in many.configs} == {1, 4, 8}
    assert many.duplicates == 0


def test_values_beyond_the_built_in_ones_are_enumerated_where_a_file_names_them():
    named = {"prefetch_distance": (7, 8), "max_registers": (224,), "num_warps": (4,)}
    space = candidates(SHAPES[0], H200, Role.DOWN, (64,), limit=100_000, limits=Limits(file=file_of(named)))
    assert {(config.prefetch_distance, config.max_registers) for config in space.configs} == {(7, 224), (8, 224)}
    free = candidates(SHAPES[0], H200, Role.DOWN, (64,), limit=1)
    assert space.outside == {"outside --space space.json": free.legal}


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_register_caps_are_members_of_the_space_and_each_may_pay(role):
    space = candidates(SHAPES[0], H200, role, (1, 64, 4096), limit=100_000)
    capped = [config for config in space.configs if config.max_registers is not None]
    assert {config.max_registers for config in capped} >= {64, 72, 80, 96, 128, 168}
    tiles = 2 if role is Role.GATE_UP else 1
    for config in capped:
        accumulators = tiles * config.block_m * config.block_n // config.block_size
        assert config.max_registers >= accumulators + MAXNREG_MARGIN
        assert replace(config, max_registers=None) in space.configs
        if config.max_registers not in STEADY_CAPS:
            room = blocks_by_registers(config.max_registers, config.block_size)
            assert room <= blocks_by_smem(config.smem_estimate(90, SHAPES[0], role), H200)
    assert space.removed["max_registers=N is under N accumulators + N"] > 0
    assert space.removed["max_registers=N makes room for N blocks, shared memory for N"] > 0


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_a_few_of_the_candidates_carry_a_cap_and_none_takes_the_place_of_its_tile(role):
    space = candidates(SHAPES[1], H200, role, (1, 64, 4096), limit=135)
    capped = [config for config in space.configs if config.max_registers is not None]
    assert 4 <= len(capped) <= 0.1 * len(space.configs)
    assert {config.max_registers for config in capped} <= set(STEADY_CAPS)
    assert len({(config.structure, config.block_m) for config in capped}) >= 4


def test_no_cap_is_enumerated_where_the_compiler_takes_none():
    space = candidates(SHAPES[0], TARGETS["gfx942"], Role.DOWN, (64,), limit=100_000)
    assert {config.max_registers for config in space.configs} == {None}


def test_under_a_register_ceiling_every_tile_goes_in_with_the_ceiling_as_its_cap():
    space = candidates(SHAPES[0], H200, Role.DOWN, (64, 4096), limit=60, limits=Limits(max_registers=150))
    capped = [config.max_registers for config in space.configs]
    assert capped[:40] == [150] * 40
    assert set(capped) <= {150, 144, 128}  # beside them a few of the built-in caps below it


@pytest.mark.parametrize("target", TARGETS)
def test_each_ceiling_is_the_most_that_lets_one_more_block_fit(target):
    device = TARGETS[target]
    reserved = 0 if device.is_amd else 1024
    total = device.smem_limit + reserved
    ceilings = smem_ceilings(device)
    assert ceilings[0] == device.smem_limit
    for blocks, ceiling in enumerate(ceilings, start=1):
        assert blocks * (ceiling + reserved) <= total < blocks * (ceiling + 1 + reserved)
        assert smem_ceiling(ceiling, device) == ceiling
        assert blocks_by_smem(ceiling, device) == blocks > blocks_by_smem(ceiling + 1, device)


@pytest.mark.parametrize("warps", [1, 2, 4, 8, 16])
def test_each_register_cap_is_steady_or_the_most_that_lets_one_more_block_fit(warps):
    block_size = 32 * warps
    for cap in register_caps(block_size):
        more, same = blocks_by_registers(cap, block_size), blocks_by_registers(cap + 1, block_size)
        assert cap in STEADY_CAPS or more > same, cap
        assert MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=16, block_k=16, max_registers=cap)


def test_legal_configs_are_counted_once_by_the_ceiling_that_they_keep_to():
    space = candidates(SHAPES[0], H200, Role.DOWN, (64,), limit=100_000)
    assert space.ceilings.total() == space.legal == len(space.configs)
    assert set(space.ceilings) <= set(smem_ceilings(H200))
    some = next(iter(sorted(space.ceilings)))
    limited = candidates(SHAPES[0], H200, Role.DOWN, (64,), limit=100_000, limits=Limits(max_smem=some))
    assert limited.legal >= space.ceilings[some]
    near = [config.smem_estimate(90, SHAPES[0], Role.DOWN) for config in limited.configs]
    assert max(near) <= some + BARRIER_BYTES


def test_limits_intersect():
    one, other = Limits(max_smem=76_800), Limits(structures=(Structure.TMA,))
    both = Limits(max_smem=76_800, structures=(Structure.TMA,))
    kept = [
        set(candidates(SHAPES[0], H200, Role.DOWN, (64,), limit=100_000, limits=limits).configs)
        for limits in (one, other, both)
    ]
    assert kept[0] & kept[1] == kept[2]
    assert kept[2]


def test_the_axes_are_all_the_choices_that_a_config_has():
    """A field added to the config must become an axis, or be named here as none."""
    from dataclasses import fields

    others = {"smem_size", "split_k", "warp_size"}
    assert {field.name for field in fields(MoEKernelConfig)} == set(NAMES) | others
    assert not set(NAMES) & others


def test_an_axis_product_is_every_combination():
    axes = Axes({"block_n": (16, 32), "num_warps": (1, 2)})
    free = {**dict.fromkeys(NAMES, (1,)), "structure": (Structure.TMA,), "block_m": (16,), "block_k": (64,)}
    free["max_registers"] = (None,)
    made = list(axes.configs(free, 32))
    assert len(made) == axes.size(free) == 4
    assert {(config.block_n, config.num_warps) for config in made} == set(product((16, 32), (1, 2)))
