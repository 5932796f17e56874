"""Memory is counted before it is taken: fewer experts, said so, or one sentence."""

from __future__ import annotations

import pytest

from moetune.errors import MissingError
from moetune.profiling.memory import SPARE_BYTES, activation_bytes, resident_experts, sharing_note
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=4096, inter=14336, local_experts=64, top_k=2)  # 352 MB an expert, 22.5 GB in all
GB = 1_000_000_000


def test_all_experts_fit_a_large_gpu_and_nothing_is_said():
    assert resident_experts(SHAPE, 4096, 140 * GB) == 64
    assert sharing_note(SHAPE, 64) is None


def test_a_24_gb_gpu_holds_fewer_experts_and_the_page_says_which():
    held = resident_experts(SHAPE, 4096, 23 * GB)
    assert 40 < held < 64
    assert held * SHAPE.expert_bytes + activation_bytes(SHAPE, 4096) + SPARE_BYTES <= 23 * GB
    assert f"{held} of 64 experts" in sharing_note(SHAPE, held)


def test_no_room_for_one_expert_is_one_sentence_with_the_numbers_and_a_way_out():
    with pytest.raises(MissingError) as caught:
        resident_experts(SHAPE, 131_072, 8 * GB)
    text = str(caught.value)
    assert "GiB" in text
    assert "--tp" in text
    assert "\n" not in text
