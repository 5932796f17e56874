"""Entries of several races by turns: no search waits for the other's kernels, and none asks for anything else than alone."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from moetune.engine.bench import Bench
from moetune.engine.budget import Deadline
from moetune.engine.entrance import by_turns
from moetune.engine.race import SAFE_ENTRANTS, Race
from moetune_kernels.config import MoEKernelConfig, Role, Structure

BASE = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
CONFIGS = [replace(BASE, block_n=n, num_warps=warps) for n in (16, 32, 64, 128) for warps in (1, 2, 4, 8)]
NEVER = Deadline(inf, lambda: 0.0)


class Rounds:
    """A search that asks for so many configs a round, and notes what happens to it."""

    def __init__(self, name, configs, size, told):
        self.name, self.left, self.size, self.told = name, list(configs), size, told
        self.open = set()

    def ask(self, count):
        if self.open:
            return []  # it waits for answers
        asked, self.left = self.left[: self.size], self.left[self.size :]
        self.open.update(asked)
        self.told.append((self.name, "ask", len(asked)))
        return asked

    def tell(self, config, outcome):
        self.open.remove(config)
        self.told.append((self.name, "tell", config))


@pytest.fixture
def opened(fake_backend):
    """Return a bench whose backend has every config of both roles compiled."""
    backend = fake_backend()
    bench = Bench(backend, backend.journal, lambda _: None)
    bench.request((role, config) for role in Role for config in CONFIGS)
    bench.collect()
    backend.open(64)
    return bench


def entrances(bench, told, sizes=(3, 3), configs=CONFIGS[:6], deadline=NEVER):
    races = {role: Race(bench, role, 64) for role in Role}
    searches = [Rounds(role.value, configs, size, told) for role, size in zip(Role, sizes, strict=True)]
    return races, [race.entering(search, deadline) for race, search in zip(races.values(), searches, strict=True)]


def test_a_round_is_thought_out_while_the_other_s_kernels_run(opened):
    told = []
    _, both = entrances(opened, told)
    by_turns(both)
    steps = [(name, what) for name, what, _ in told]
    up, down = (role.value for role in Role)
    assert steps[:5] == [(up, "ask"), (up, "tell"), (down, "ask"), (up, "tell"), (up, "tell")]
    assert steps[5:9] == [(down, "tell"), (up, "ask"), (down, "tell"), (down, "tell")]
    assert [size for name, what, size in told if (name, what) == (up, "ask")] == [3, 3, 0]


@pytest.mark.parametrize("sizes", [(3, 3), (2, 6), (6, 1), (24, 5)])
def test_every_search_has_all_its_answers_whatever_the_other_does(opened, sizes):
    told = []
    races, both = entrances(opened, told, sizes)
    by_turns(both)
    for role, race in races.items():
        assert list(race.asked) == CONFIGS[:6]
        assert [config for name, what, config in told if (name, what) == (role.value, "tell")] == CONFIGS[:6]
        assert set(opened.ended(role, 64)) == set(CONFIGS[:6])


def test_a_deadline_that_is_over_leaves_each_race_its_fewest(opened):
    told = []
    races, both = entrances(opened, told, (4, 5), CONFIGS, Deadline(0.0, lambda: 1.0))
    by_turns(both)
    for role, race in races.items():
        assert race.was_cut
        assert len(opened.ended(role, 64)) == SAFE_ENTRANTS


def test_what_came_from_the_compiler_meanwhile_is_not_left_for_later(fake_backend):
    backend = fake_backend()
    bench = Bench(backend, backend.journal, lambda _: None)
    backend.open(64)
    told = []
    bench.request([(Role.DOWN, CONFIGS[0])])  # under way: nobody has asked the compiler yet
    race = Race(bench, Role.DOWN, 64)
    by_turns([race.surveying(Rounds("down", CONFIGS[:2], 2, told), NEVER)])
    assert list(bench.ended(Role.DOWN, 64)) == [CONFIGS[0]]
    race.enter_late(NEVER)
    assert list(bench.ended(Role.DOWN, 64)) == CONFIGS[:2]
