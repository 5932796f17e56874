"""The router against its reference, bit by bit where ids are concerned."""

from __future__ import annotations

import pytest
import torch

from moetune_kernels.permute import SlotOrder, permute_reference
from moetune_kernels.route import route, route_reference
from moetune_kernels.route.launch import route_order_calls

ORDER_FIELDS = ("slots", "expert_offsets", "block_expert", "block_row", "block_end", "num_blocks")

SIZES = [
    pytest.param(1, 8, 2, id="one-token"),
    pytest.param(3, 5, 2, id="five-experts"),
    pytest.param(4, 60, 4, id="sixty-experts"),
    pytest.param(9, 384, 6, id="top-six-of-384"),
    pytest.param(2, 1024, 16, id="most-experts-most-choices"),
    pytest.param(64, 4, 1, id="top-one-keeps-its-column"),
    pytest.param(5, 4, 4, id="every-expert-chosen"),
    pytest.param(6, 512, 10, id="top-ten-of-512"),
]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES)
def test_route_matches_its_reference(tokens, experts, top_k, renormalize):
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    weights, ids = route(logits, top_k, renormalize=renormalize)
    want_weights, want_ids = route_reference(logits, top_k, renormalize=renormalize)
    assert weights.shape == (tokens, top_k)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-7)


def test_weights_are_the_known_softmax_values():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain, _ = route(logits, 2, renormalize=False)
    scaled, ids = route(logits, 2, renormalize=True)
    torch.testing.assert_close(plain, torch.tensor([[0.6439, 0.2369]]), rtol=0, atol=1e-4)
    torch.testing.assert_close(scaled, torch.tensor([[0.7311, 0.2689]]), rtol=0, atol=1e-4)
    assert ids.tolist() == [[0, 1]]


def test_one_choice_keeps_its_column_and_weighs_one():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 0.0]])
    weights, ids = route(logits, 1)
    assert weights.tolist() == [[1.0], [1.0]]
    assert ids.tolist() == [[0], [2]]
    torch.testing.assert_close(route(logits, 1, renormalize=False)[0], logits.softmax(1).max(1, keepdim=True).values)


def test_equal_logits_go_to_the_lowest_id_and_minus_zero_is_zero():
    logits = torch.tensor([[0.0, -0.0, 0.0, 1.0], [-0.0, 0.0, -0.0, -0.0]])
    assert route(logits, 3)[1].tolist() == [[3, 0, 1], [0, 1, 2]]


def test_degenerate_rows_keep_ids_distinct_and_weights_finite_and_leave_other_rows_alone():
    clean = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    dirty = clean.clone()
    dirty[3] = torch.nan
    dirty[5, 2] = torch.nan
    dirty[6, 9] = torch.inf
    dirty[7] = -torch.inf
    weights, ids = route(dirty, 4)
    assert weights.isfinite().all()
    assert ((ids >= 0) & (ids < 16)).all()
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert weights[3].tolist() == [0.0] * 4
    assert 2 not in ids[5].tolist()
    assert ids[6, 0] == 9
    assert weights[6].tolist() == [1.0, 0.0, 0.0, 0.0]
    clean_weights, clean_ids = route(clean, 4)
    for row in (0, 1, 2, 4):
        assert torch.equal(ids[row], clean_ids[row])
        assert torch.equal(weights[row], clean_weights[row])


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 8, 2), (64, 4, 1), (64, 1, 1), (8, 128, 8), (6, 512, 10), (7, 60, 5), (32, 8, 2), (4, 1024, 16)],
)
def test_the_router_writes_the_slot_order_in_its_own_launch(tokens, experts, top_k, block_m):
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(1))
    weights, ids = torch.empty(tokens, top_k), torch.empty(tokens, top_k, dtype=torch.int32)
    order = SlotOrder.empty(tokens * top_k, experts, block_m, "cpu")
    for name in ORDER_FIELDS:
        getattr(order, name).fill_(-7)
    calls = route_order_calls(logits, weights, ids, True, order)
    assert len(calls) == 1
    calls[0].launch()
    want_weights, want_ids = route_reference(logits, top_k)
    want = permute_reference(want_ids, experts, block_m)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-7)
    for name in ORDER_FIELDS:
        assert torch.equal(getattr(order, name), getattr(want, name)), name


@pytest.mark.parametrize(
    ("shape", "top_k", "names"),
    [((2, 4), 6, "top_k"), ((2, 1025), 8, "1024"), ((2, 32), 17, "16"), ((4,), 1, "logits"), ((2, 4), 0, "top_k")],
)
def test_sizes_beyond_the_limits_are_refused_with_the_limit(shape, top_k, names):
    with pytest.raises(ValueError, match=names):
        route(torch.zeros(shape), top_k)


def test_zero_tokens_route_to_nothing_without_a_launch():
    weights, ids = route(torch.empty(0, 8), 2)
    assert weights.shape == ids.shape == (0, 2)
