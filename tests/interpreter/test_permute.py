"""The slot order against its reference: each routed slot once, grouped by expert, cut into blocks."""

from __future__ import annotations

import pytest
import torch

from moetune_kernels.permute import SlotOrder, launch, permute, permute_reference
from moetune_kernels.permute.order import block_bound

FIELDS = ("slots", "expert_offsets", "block_expert", "block_row", "block_end", "num_blocks")


def same(got: SlotOrder, want: SlotOrder) -> None:
    for name in FIELDS:
        assert torch.equal(getattr(got, name), getattr(want, name)), name


ROUTINGS = {
    "all-tokens-to-one-expert": lambda: torch.full((40, 1), 3),
    "only-the-first-and-last-expert": lambda: torch.tensor([[0, 7]] * 6),
    "nobody-is-routed": lambda: torch.full((5, 2), -1),
    "ids-far-out-of-range": lambda: torch.tensor([[1, 8], [2_000_000_000, 0], [7, -1]]),
    "random-with-holes": lambda: torch.randint(-1, 8, (97, 3), generator=torch.Generator().manual_seed(0)),
    "one-slot": lambda: torch.tensor([[5]]),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("block_m", [16, 64, 128])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_permute_matches_its_reference(routing, block_m, dtype):
    ids = ROUTINGS[routing]().to(dtype)
    same(permute(ids, 8, block_m), permute_reference(ids, 8, block_m))


def test_ids_past_32_bits_are_not_wrapped_into_range():
    ids = torch.tensor([[(1 << 32) + 3, 2]])
    same(permute(ids, 8, 16), permute_reference(ids, 8, 16))


@pytest.mark.parametrize("experts", [1, 3, 128, 384, 1024])
@pytest.mark.parametrize("tokens", [1, 3, 97])
def test_any_expert_count_sorts_in_one_launch(tokens, experts):
    ids = torch.randint(0, experts, (tokens, 8), generator=torch.Generator().manual_seed(tokens))
    same(permute(ids, experts, 16), permute_reference(ids, experts, 16))


@pytest.mark.parametrize("experts", [4, 300])
def test_many_slots_sort_in_three_launches(experts, monkeypatch):
    monkeypatch.setattr(launch, "ONE_LAUNCH_SLOTS", 64)
    ids = torch.randint(-1, experts + 1, (333, 3), generator=torch.Generator().manual_seed(2))
    order = SlotOrder.empty(ids.numel(), experts, 32, "cpu")
    assert len(launch.permute_calls(ids, experts, order)) == 3
    same(permute(ids, experts, 32), permute_reference(ids, experts, 32))


def test_strided_ids_are_read_by_their_strides():
    wide = torch.randint(0, 16, (33, 16), generator=torch.Generator().manual_seed(3))
    same(permute(wide[:, :4], 16, 16), permute_reference(wide[:, :4].contiguous(), 16, 16))


def test_the_block_bound_is_reached_and_never_passed():
    for slots in range(1, 70):
        for experts in (1, 3, 8):
            worst = max(
                sum(-(-count // 16) for count in split)
                for split in ([slots], [1] * min(slots, experts - 1) + [max(slots - experts + 1, 0)])
            )
            assert worst <= block_bound(slots, experts, 16)
    assert block_bound(2, 8, 16) == 2
    assert block_bound(33, 1, 16) == 3


def test_no_slots_make_no_blocks():
    order = permute(torch.empty((0, 2), dtype=torch.int32), 4, 16)
    assert order.num_blocks.tolist() == [0]
    assert order.expert_offsets.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("ids", "experts", "block_m", "names"),
    [
        (torch.zeros(3), 4, 16, "topk_ids"),
        (torch.zeros((3, 2)), 4, 16, "int32"),
        (torch.zeros((3, 2), dtype=torch.int32), 1025, 16, "1024"),
        (torch.zeros((3, 2), dtype=torch.int32), 4, 48, "block_m"),
    ],
)
def test_bad_arguments_are_refused_by_name(ids, experts, block_m, names):
    with pytest.raises(ValueError, match=names):
        permute(ids, experts, block_m)
