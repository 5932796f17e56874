"""The guess against what was measured: rules that single pairs of kernels showed, and how it ranks a whole space.

Times are those of ``benchmarks/truth``: qwen3-30b-a3b on an NVIDIA H200, medians in microseconds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moetune.engine.rehearsal import truth_of
from moetune.outcome import Measured
from moetune.space.prior import Problem, blocks_per_sm, predict
from moetune.store import load_recording
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.shape import MoEShape

QWEN = MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8)
MIXTRAL = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
H200 = TARGETS["sm_90"]
TALL = MoEKernelConfig(structure=Structure.TMA, block_m=128, block_n=128, block_k=64, num_warps=8, group_m=8)
LOW = MoEKernelConfig(structure=Structure.GATHER, block_m=32, block_n=128, block_k=128, num_warps=4)
TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth" / "e128_h2048_i768_k8_bf16.jsonl.xz"


def ratio(one, other, role, tokens, shape=QWEN):
    problem = Problem(shape, H200, role)
    return predict(one, problem, tokens) / predict(other, problem, tokens)


def blocks(config, role):
    return blocks_per_sm(config, Problem(QWEN, H200, role))


# pairs


def test_two_stages_starve_the_only_block_of_a_multiprocessor():
    """701 against 445: neither leaves room for a second block."""
    two, three = (replace(TALL, prefetch_distance=stages) for stages in (2, 3))
    assert blocks(two, Role.GATE_UP) == blocks(three, Role.GATE_UP) == 1
    assert ratio(two, three, Role.GATE_UP, 4096) > 1.25


def test_two_stages_cost_little_where_they_make_room_for_another_block():
    """505 against 529 at 64x128; at 256 tokens 187.0 against 189.3 at 32x128x128, the best of all there."""
    two, three = (replace(TALL, block_m=64, num_warps=4, prefetch_distance=stages) for stages in (2, 3))
    assert (blocks(two, Role.GATE_UP), blocks(three, Role.GATE_UP)) == (2, 1)
    assert ratio(two, three, Role.GATE_UP, 4096) < 1.1
    two, three = (replace(LOW, prefetch_distance=stages) for stages in (2, 3))
    assert (blocks(two, Role.GATE_UP), blocks(three, Role.GATE_UP)) == (3, 1)
    assert ratio(two, three, Role.GATE_UP, 256) < 1.005


def test_a_second_block_fills_the_gaps_of_tiles_with_few_steps():
    """229.6 against 275.9 in down, whose tiles have twelve steps: three stages fit twice, four do not."""
    three, four = (replace(TALL, prefetch_distance=stages) for stages in (3, 4))
    assert (blocks(three, Role.DOWN), blocks(four, Role.DOWN)) == (2, 1)
    assert ratio(three, four, Role.DOWN, 4096) < 0.99
    many_steps = ratio(three, four, Role.DOWN, 4096, shape=MIXTRAL)
    assert many_steps > ratio(three, four, Role.DOWN, 4096) + 0.01


def test_grouping_rows_matters_where_an_expert_has_many_row_tiles_and_little_where_it_has_two():
    """Alone against grouped by eight: 203.1 against 206.1 at 256 tokens, 387.6 against 379.9 at 4096."""
    low = replace(LOW, block_m=16)
    assert ratio(low, replace(low, group_m=8), Role.GATE_UP, 256) < 1.08
    tall = replace(TALL, block_m=64, block_n=256, prefetch_distance=3)
    assert 1.02 < ratio(replace(tall, group_m=1), tall, Role.GATE_UP, 4096) < 1.5


def test_weights_that_two_row_tiles_read_cost_more_than_weights_that_one_reads():
    """At 16 rows per expert nearly half of all experts fill a second tile of 16 rows: 199.2 at best, 187.0 with 32."""
    best = {
        block_m: min(
            predict(replace(LOW, block_m=block_m, prefetch_distance=stages, group_m=8), problem, 256)
            for stages in (2, 3, 4)
        )
        for problem in [Problem(QWEN, H200, Role.GATE_UP)]
        for block_m in (16, 32)
    }
    assert best[16] > best[32]


# the whole space


@pytest.fixture(scope="module")
def truth():
    recording = load_recording(TRUTH)
    return truth_of(recording.provenance.shape, recording.provenance.device, recording.trials)


def ranked(truth, role, tokens):
    """Return measured times in the order of the guess."""
    problem = Problem(truth.shape, truth.device, role)
    ended = {c: end.median_us for c, end in truth.answers[role, tokens].items() if isinstance(end, Measured)}
    return np.array([ended[config] for config in sorted(ended, key=lambda c: predict(c, problem, tokens))])


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
@pytest.mark.parametrize(("tokens", "least"), [(16, 0.7), (256, 0.68), (4096, 0.72)])
def test_the_guess_ranks_all_that_was_timed(truth, role, tokens, least):
    times = ranked(truth, role, tokens)
    assert np.corrcoef(np.arange(len(times)), np.argsort(np.argsort(times)))[0, 1] > least


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_the_best_at_a_few_rows_per_expert_are_among_the_first_fifth_of_the_guess(truth, role):
    times = ranked(truth, role, 256)
    assert float(np.median(np.argsort(times)[:10])) < len(times) / 5
