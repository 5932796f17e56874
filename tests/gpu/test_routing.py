"""Routings on a real GPU: the route kernels pick the wanted ids, and a backend times and counts under each of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moetune.engine.backend import compiled_now
from moetune.measure.card import card_state, troubles
from moetune.measure.clocks import Clocks
from moetune.measure.inputs import make_rows, other_routings, rows_seed
from moetune.measure.router import logits_of, router_of
from moetune.models.routing import UNIFORM, Hot, Zipf, parse_routing
from moetune.outcome import Compiled, Failed, Measured, Stage
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.plan import LayerPlan
from moetune_kernels.route import route, route_reference
from moetune_kernels.shape import MoEShape

pytestmark = [pytest.mark.gpu, pytest.mark.plain_memory]

SHAPE = MoEShape(hidden=1024, inter=512, local_experts=32, top_k=4)
RANK = MoEShape(hidden=1024, inter=512, local_experts=8, experts=32, top_k=4)
CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
PLAN = LayerPlan(gate_up=CONFIG, down=CONFIG)
GPU = torch.device("cuda", 0)
ROUTINGS = [UNIFORM, Zipf(), Zipf(3.0), Hot(), Hot(1.0)]


@pytest.fixture
def trace(tmp_path):
    ids = np.stack([np.random.default_rng(row).permutation(32)[:4] for row in range(500)])
    np.savez(tmp_path / "trace.npz", topk_ids=ids)
    return parse_routing(str(tmp_path / "trace.npz"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("total", "top_k"), [(1, 1), (8, 2), (128, 8), (512, 16)])
@pytest.mark.parametrize("tokens", [1, 7, 4096])
def test_the_route_kernel_picks_exactly_the_wanted_ids_in_their_order(dtype, total, top_k, tokens):
    generator = torch.Generator(GPU).manual_seed(tokens)
    wanted = torch.rand((tokens, total), device=GPU, generator=generator).argsort(dim=1)[:, :top_k]
    _, ids = route(logits_of(wanted, total, generator, dtype), top_k)
    assert torch.equal(ids.long(), wanted)


@pytest.mark.parametrize("shape", [SHAPE, RANK], ids=["whole", "rank"])
@pytest.mark.parametrize("tokens", [1, 16, 5000])
def test_kernel_and_reference_route_every_distribution_alike(shape, tokens, trace):
    for routing in [*ROUTINGS, trace]:
        router = router_of(routing, shape)
        logits = make_rows(shape, tokens, GPU, rows_seed(0, tokens), router).logits
        _, ids = route(logits, shape.top_k)
        assert torch.equal(ids, route_reference(logits, shape.top_k)[1]), routing.text
        again = make_rows(shape, tokens, GPU, rows_seed(0, tokens), router_of(routing, shape)).logits
        assert torch.equal(logits, again), routing.text
        if routing == Hot(1.0):
            assert bool((ids == router.hot).any(dim=1).all())


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda one: one.text)
def test_a_layer_is_timed_in_rounds_with_its_clocks_and_verified_under_each_routing(routing):
    from moetune.measure.cuda import CudaBackend

    backend = CudaBackend(SHAPE, 0, routing=routing, workers=2)
    try:
        for role in Role:
            assert all(isinstance(one, Compiled) for _, one in compiled_now(backend, role, [CONFIG]))
        assert backend.open(64) is None
        assert backend.verify_layer(PLAN) is None
        (outcome,) = backend.time_layers([PLAN], 16)
        assert isinstance(outcome, Measured), outcome
        assert len(outcome.times_us) == outcome.samples == 16
        assert min(outcome.times_us) <= outcome.median_us <= max(outcome.times_us)
        assert outcome.median_us > backend.bound_us()
        assert outcome.clocks is not None
        low, high = outcome.clocks.sm_mhz or (1, 1)  # a container may hide it
        assert 0 < low <= high
        assert backend.clocks().over(outcome.clocks) == backend.clocks()
        assert all(isinstance(one, Measured) for beside in backend.time_rerouted([PLAN, PLAN], 4) for one in beside)
    finally:
        backend.close()


def test_a_skewed_router_touches_fewer_experts_so_less_is_read():
    def touched(routing):
        logits = make_rows(SHAPE, 16, GPU, 1, router_of(routing, SHAPE)).logits
        return len(route(logits, SHAPE.top_k)[1].unique())

    assert touched(Zipf(3.0)) < touched(UNIFORM)
    assert len(other_routings(SHAPE, 200, GPU, 7, router_of(Zipf(3.0), SHAPE))) > 1


@pytest.mark.timeout(900)
def test_a_sweep_says_under_which_routing_and_at_which_clocks_it_measured(tmp_path):
    from moetune.store import Store
    from moetune.tuning import SweepRequest, sweep

    request = SweepRequest(
        shape=SHAPE,
        tokens=(1, 64),
        budget_s=60.0,
        out_dir=tmp_path / "tables",
        store_path=tmp_path / "trials.sqlite",
        routing=Zipf(),
    )
    result = sweep(request)
    assert result.table.routing == "zipf:1.1"
    assert result.clocks is not None
    with Store(result.store_path) as store:
        finals = [row for row in store.rows(SHAPE) if row.trial.stage is Stage.FINAL]
        assert {row.routing for row in finals} == {"zipf:1.1"}
        timed = [row.trial.outcome for row in finals if isinstance(row.trial.outcome, Measured)]
        assert all(len(outcome.times_us) == outcome.samples for outcome in timed)
        assert all(outcome.clocks is not None for outcome in timed)


@pytest.mark.timeout(900)
def test_counted_launches_route_as_the_timed_ones_did(trace):
    """The worker under ncu makes its own rows: its padded FLOPs are those of the tiles that the timed rows need."""
    from moetune.measure.counters import PROFILE_SETS, CounterJob, counters_unavailable, read_counters
    from moetune.measure.parts import Part
    from moetune.models.roofline import executed_rows

    reason = counters_unavailable()
    if reason is not None:
        pytest.skip(f"no hardware counters: {reason}")
    for routing in (Zipf(2.0), trace):
        job = CounterJob(shape=SHAPE, tokens=256, plan=PLAN, routing=routing)
        launches = read_counters([job], sets=PROFILE_SETS)[job]
        assert not isinstance(launches, Failed), launches
        logits = make_rows(SHAPE, 256, GPU, rows_seed(0, 256), router_of(routing, SHAPE)).logits
        counts = torch.bincount(route(logits, SHAPE.top_k)[1].flatten().long(), minlength=SHAPE.local_experts)
        rows = executed_rows(counts.tolist(), CONFIG.block_m)
        gate_up = next(launch for launch in launches if launch.part is Part.GATE_UP)
        if gate_up.tensor_flops is not None:
            assert gate_up.tensor_flops == pytest.approx(4.0 * rows * SHAPE.hidden * SHAPE.inter, rel=1e-6)


def test_the_card_says_who_is_on_it_or_nothing_at_all():
    clocks = Clocks.of_device(0)
    try:
        state = card_state(clocks)
    finally:
        clocks.close()
    assert state.busy_percent is None or 0 <= state.busy_percent <= 100
    assert all("\n" not in text for text in troubles(state))
