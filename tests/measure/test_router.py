"""Routings as logits: the runtime's own router must pick exactly the wanted ids, in the wanted proportions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moetune.errors import UsageError
from moetune.measure import router as router_module
from moetune.measure.inputs import LOST_AMONG_OTHERS, ROUTINGS, make_rows, other_routings, rows_seed
from moetune.measure.router import HotRouter, ZipfRouter, logits_of, router_of
from moetune.models.roofline import total_experts
from moetune.models.routing import UNIFORM, Hot, Zipf, parse_routing
from moetune_kernels.route import route_reference
from moetune_kernels.shape import MoEShape, WeightFormat

CPU = torch.device("cpu")
SHAPE = MoEShape(hidden=16, inter=16, local_experts=32, top_k=4)
RANK = MoEShape(hidden=16, inter=16, local_experts=8, experts=32, top_k=4)
ALL_CHOSEN = MoEShape(hidden=16, inter=16, local_experts=4, top_k=4)
ONE = MoEShape(hidden=16, inter=16, local_experts=1, top_k=1)


def draws(seed=1):
    return torch.Generator().manual_seed(seed)


def picked(logits, top_k):
    return route_reference(logits, top_k)[1].long()


def ids_of(routing, shape, tokens, seed=1, order_seed=0):
    return picked(make_rows(shape, tokens, CPU, seed, router_of(routing, shape, order_seed)).logits, shape.top_k)


def trace(tmp_path, ids, **arrays):
    path = tmp_path / "trace.npz"
    np.savez(path, topk_ids=ids, **arrays)
    return parse_routing(str(path))


# Wanted ids, chosen by any right router


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("total", "top_k"), [(1, 1), (4, 4), (8, 2), (16, 16), (128, 8), (512, 16)])
def test_the_router_picks_exactly_the_wanted_ids_in_their_order(dtype, total, top_k):
    wanted = torch.stack([torch.randperm(total, generator=draws(row))[:top_k] for row in range(500)])
    logits = logits_of(wanted, total, draws(), dtype)
    assert logits.dtype is dtype
    assert torch.equal(picked(logits, top_k), wanted)


def test_no_tie_and_no_other_order_of_ties_moves_the_edge():
    wanted = torch.stack([torch.randperm(64, generator=draws(row))[:16] for row in range(2000)])
    logits = logits_of(wanted, 64, draws(), torch.bfloat16)
    backwards = 63 - picked(logits.flip(1), 16)  # ties would now go to the highest id
    assert torch.equal(backwards, wanted)
    ordered = logits.float().sort(dim=1, descending=True).values
    assert float((ordered[:, 15] - ordered[:, 16]).min()) > 0.25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recorded_weights_come_out_of_the_router_and_choose_the_same_set(dtype):
    wanted = torch.stack([torch.randperm(64, generator=draws(row))[:8] for row in range(500)])
    weights = torch.rand(wanted.shape, generator=draws())
    weights[0] = 0.5  # ties, which the lower id wins
    weights[1, 3:] = 0.0
    weights[2] = 0.0
    logits = logits_of(wanted, 64, draws(), dtype, weights)
    got, ids = route_reference(logits, 8)
    assert torch.equal(ids.long().sort(dim=1).values, wanted.sort(dim=1).values)
    assert ids[0].tolist() == sorted(wanted[0].tolist())
    want = torch.zeros(500, 64).scatter(1, wanted, weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-9))
    have = torch.zeros(500, 64).scatter(1, ids.long(), got)
    assert float((want - have)[3:].abs().max()) < 0.01
    assert float(have[1, wanted[1, 3:]].max()) < 1e-6


# Distributions


@pytest.mark.parametrize("routing", [UNIFORM, Zipf(), Zipf(2.5), Hot(), Hot(1.0)], ids=lambda one: one.text)
@pytest.mark.parametrize("shape", [SHAPE, RANK, ALL_CHOSEN, ONE], ids=["whole", "rank", "K-is-E", "E-is-1"])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_every_token_has_k_different_experts_and_a_seed_says_which(routing, shape, tokens):
    ids = ids_of(routing, shape, tokens)
    assert ids.shape == (tokens, shape.top_k)
    assert 0 <= int(ids.min()) <= int(ids.max()) < total_experts(shape)
    assert all(len(set(row)) == shape.top_k for row in ids.tolist())
    assert torch.equal(ids, ids_of(routing, shape, tokens))
    if tokens == 300 and shape in (SHAPE, RANK):
        assert not torch.equal(ids, ids_of(routing, shape, tokens, seed=2))


def test_uniform_rows_are_what_they_were_before_there_was_another_routing():
    generator = torch.Generator().manual_seed(rows_seed(0, 64))
    x = torch.randn((64, 16), dtype=torch.bfloat16, generator=generator)
    logits = torch.randn((64, 32), dtype=torch.bfloat16, generator=generator)
    for rows in (
        make_rows(SHAPE, 64, CPU, rows_seed(0, 64)),
        make_rows(SHAPE, 64, CPU, rows_seed(0, 64), router_of(UNIFORM, SHAPE)),
    ):
        assert torch.equal(rows.x, x)
        assert torch.equal(rows.logits, logits)


@pytest.mark.parametrize("routing", [Zipf(), Hot()], ids=lambda one: one.text)
def test_rows_of_another_routing_hold_the_same_values(routing):
    """Only where they go differs, so times of two routings are of equal data."""
    uniform, other = (make_rows(SHAPE, 9, CPU, 5, router_of(one, SHAPE)) for one in (UNIFORM, routing))
    assert torch.equal(uniform.x, other.x)


@pytest.mark.parametrize("exponent", [0.5, 1.1, 2.0])
def test_zipf_popularity_falls_by_its_exponent(exponent):
    """With one expert per token the counts are the shares; drawn without replacement they would be evened out."""
    shape = MoEShape(hidden=16, inter=16, local_experts=16, top_k=1)
    tokens = 40_000
    counts = torch.bincount(ids_of(Zipf(exponent), shape, tokens).flatten(), minlength=16).double()
    shares = torch.arange(1, 17, dtype=torch.float64) ** -exponent
    expected = tokens * shares / shares.sum()
    found = counts.sort(descending=True).values
    assert float(((found - expected).abs() / expected.sqrt()).max()) < 5  # standard deviations of a count
    router = router_of(Zipf(exponent), shape)
    assert isinstance(router, ZipfRouter)
    assert torch.equal(counts.argsort(descending=True)[:3], router.order[:3])
    assert router.rarest_share == pytest.approx(float(expected[-1]) / tokens)


def test_the_popular_experts_are_permuted_by_the_order_seed_and_the_same_at_every_token_count():
    first = [router_of(Zipf(), SHAPE, seed).order.tolist() for seed in range(20)]
    assert sorted(first[0]) == list(range(32))
    assert len({order[0] for order in first}) > 10
    popular = [
        ids_of(Zipf(2.0), SHAPE, tokens, seed=rows_seed(0, tokens)).flatten().mode().values
        for tokens in (200, 300, 500)
    ]
    assert len(set(map(int, popular))) == 1
    hot = [router_of(Hot(), SHAPE, seed).hot for seed in range(20)]
    assert len(set(hot)) > 10


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("shape", [SHAPE, RANK], ids=["whole", "rank"])
def test_the_hot_expert_is_among_the_top_k_of_its_share_of_the_tokens(share, shape):
    tokens = 2000
    ids = ids_of(Hot(share), shape, tokens)
    router = router_of(Hot(share), shape)
    assert isinstance(router, HotRouter)
    assert router.hot < shape.local_experts  # of this rank
    has = ids == router.hot
    assert int(has.sum()) in (int(share * tokens), int(share * tokens) + 1)
    places = has.sum(dim=0)
    assert int(places.min()) > 0.15 * int(places.sum())  # not always the first choice
    rest = torch.bincount(ids[~has], minlength=32).double()
    rest = torch.cat([rest[: router.hot], rest[router.hot + 1 :]])
    assert float(((rest - rest.mean()).abs() / rest.mean().sqrt()).max()) < 5


def test_a_single_token_has_the_hot_expert_as_often_as_its_share_says():
    router = router_of(Hot(0.5), SHAPE)
    has = [router.hot in ids_of(Hot(0.5), SHAPE, 1, seed).flatten().tolist() for seed in range(200)]
    assert 70 < sum(has) < 130


def test_rows_are_drawn_in_chunks_that_leave_no_seam(monkeypatch):
    monkeypatch.setattr(router_module, "CHUNK", 32 * 7)  # seven rows at a time
    for routing in (Zipf(), Hot(0.5)):
        ids = ids_of(routing, SHAPE, 100)
        assert ids.shape == (100, 4)
        assert all(len(set(row)) == 4 for row in ids.tolist())
    hot = router_of(Hot(0.5), SHAPE).hot
    assert int((ids_of(Hot(0.5), SHAPE, 100) == hot).sum()) in (50, 51)


# Traces


def test_recorded_rows_are_drawn_by_seed_and_each_at_most_once(tmp_path):
    ids = np.stack([np.random.default_rng(row).permutation(32)[:4] for row in range(50)])
    routing = trace(tmp_path, ids)
    drawn = ids_of(routing, SHAPE, 50)
    assert sorted(drawn.tolist()) == sorted(ids.tolist())
    assert drawn.tolist() != ids.tolist()
    assert torch.equal(drawn, ids_of(routing, SHAPE, 50))
    few = ids_of(routing, SHAPE, 10, seed=3)
    assert {tuple(row) for row in few.tolist()} <= {tuple(row) for row in ids.tolist()}
    many = ids_of(routing, SHAPE, 200)
    assert {tuple(row) for row in many.tolist()} <= {tuple(row) for row in ids.tolist()}
    assert len(many) == 200


def test_recorded_weights_go_with_their_ids(tmp_path):
    ids = np.array([[0, 5, 9, 31], [31, 2, 1, 0]])
    weights = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]], dtype=np.float32)
    routing = trace(tmp_path, ids, topk_weights=weights)
    rows = make_rows(SHAPE, 40, CPU, 1, router_of(routing, SHAPE))
    got, chosen = route_reference(rows.logits, 4)
    for row, (experts, shares) in enumerate(zip(chosen.tolist(), got.tolist(), strict=True)):
        want = ids[0] if 5 in experts else ids[1]
        wanted = dict(zip(want.tolist(), (weights[0] if 5 in experts else weights[1]).tolist(), strict=True))
        assert dict(zip(experts, shares, strict=True)) == pytest.approx(wanted, abs=0.01), row


def test_slots_that_went_nowhere_go_to_experts_of_other_ranks(tmp_path):
    ids = np.array([[3, -1, 7, -1], [-1, -1, -1, -1], [0, 1, 2, 3], [-1, 20, 9, 4], [-1, -1, -1, 6]])
    routing = trace(tmp_path, ids)
    chosen = ids_of(routing, RANK, 400)
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    local = {tuple(sorted(one for one in row if one < 8)) for row in chosen.tolist()}
    assert local == {(3, 7), (0, 1, 2, 3), (4,), (6,)}
    with pytest.raises(UsageError, match="fewer than 4 experts"):
        router_of(routing, SHAPE)


def test_a_trace_that_changed_on_disk_is_not_drawn_from(tmp_path):
    routing = trace(tmp_path, np.array([[0, 1, 2, 3]]))
    trace(tmp_path, np.array([[4, 5, 6, 7]]))
    with pytest.raises(UsageError, match="changed since"):
        router_of(routing, SHAPE)


# Other routings of the same distribution


@pytest.mark.parametrize("routing", [Zipf(), Hot(0.9)], ids=lambda one: one.text)
@pytest.mark.parametrize("tokens", [4, 40])
def test_other_routings_keep_the_distribution_and_touch_other_numbers_of_experts(routing, tokens):
    router = router_of(routing, SHAPE)
    found = other_routings(SHAPE, tokens, CPU, 7, router)
    touched = [len(picked(logits, 4).unique()) for logits in found]
    assert touched == sorted(set(touched))
    assert 1 < len(found) <= ROUTINGS
    popular = router.order[0] if isinstance(router, ZipfRouter) else router.hot
    counts = torch.stack([torch.bincount(picked(logits, 4).flatten(), minlength=32) for logits in found]).sum(dim=0)
    assert int(counts.argmax()) == int(popular)


def test_a_skewed_router_leaves_experts_untouched_where_a_uniform_one_no_longer_does():
    tokens = 200
    assert other_routings(SHAPE, tokens, CPU, 7) == []
    assert len(other_routings(SHAPE, tokens, CPU, 7, router_of(Zipf(3.0), SHAPE))) > 1
    assert other_routings(SHAPE, 32 * LOST_AMONG_OTHERS // 4, CPU, 7, router_of(Zipf(8.0), SHAPE)) == []


def test_recorded_rows_touch_other_numbers_of_experts_from_draw_to_draw(tmp_path):
    ids = np.stack([np.random.default_rng(row).permutation(32)[:4] for row in range(50)])
    router = router_of(trace(tmp_path, ids), SHAPE)
    found = other_routings(SHAPE, 5, CPU, 7, router)
    rows = {tuple(row) for row in ids.tolist()}
    assert len(found) > 1
    assert all({tuple(row) for row in picked(logits, 4).tolist()} <= rows for logits in found)


def test_fp16_layers_route_as_bf16_ones():
    shape = MoEShape(hidden=16, inter=16, local_experts=32, top_k=4, format=WeightFormat.FP16)
    assert torch.equal(ids_of(Zipf(), shape, 50), ids_of(Zipf(), SHAPE, 50))
