"""The live backend on a real GPU: what it compiles is what it launches, what it times is right, what is wrong fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moetune.engine.backend import EntryTerms, compiled_now
from moetune.outcome import Compiled, Failed, FailureKind, Measured, Source
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

pytestmark = [pytest.mark.gpu, pytest.mark.plain_memory]

SHAPE = MoEShape(hidden=1024, inter=512, local_experts=16, top_k=4)
SMALL = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
LARGE = MoEKernelConfig(structure=Structure.GATHER, block_m=64, block_n=64, block_k=64, num_warps=4)
PLANS = [LayerPlan(gate_up=SMALL, down=SMALL), LayerPlan(gate_up=LARGE, down=LARGE)]


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    from moetune.measure.cuda import CudaBackend

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton-cache")))
        backend = CudaBackend(SHAPE, 0, workers=4)
        try:
            compiled = {role: dict(compiled_now(backend, role, [SMALL, LARGE])) for role in Role}
            assert all(isinstance(one, Compiled) for results in compiled.values() for one in results.values()), compiled
            yield backend
        finally:
            backend.close()


@pytest.fixture(params=[1, 64, 1000])
def opened(backend, request):
    assert backend.open(request.param) is None
    return backend


def cache_entries():
    """Kernels in Triton's cache; the C launchers beside them are built where a GPU is, so only in this process."""
    return {path.parent.name for path in Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("config", [SMALL, LARGE], ids=["small", "large"])
def test_a_kernel_is_launched_from_the_cache_verified_and_timed(opened, role, config):
    before = cache_entries()
    first_us = opened.first_launch_us(role, config)
    assert not isinstance(first_us, Failed), first_us
    assert cache_entries() == before  # nothing was compiled in this process
    assert opened.verify_kernel(role, config) is None
    outcome = opened.time_kernel(role, config, 9)
    assert isinstance(outcome, Measured), outcome
    assert outcome.samples == 9
    assert 1.0 < outcome.median_us < 5000.0
    assert first_us < 20 * outcome.median_us + 100.0
    assert outcome.flops_per_byte.source is Source.ANALYTICAL
    assert outcome.issue_efficiency.source in (Source.STATIC, Source.UNAVAILABLE)


def test_kernels_one_after_the_other_end_as_each_does_alone(opened):
    big = MoEKernelConfig(
        structure=Structure.GATHER, block_m=128, block_n=128, block_k=128, num_warps=8, prefetch_distance=5
    )
    terms = EntryTerms(slow_ratio=1000.0, samples=3, long_samples=1, long_us=1e9)
    small, failed, large = opened.enter_kernels(Role.GATE_UP, [SMALL, big, LARGE], terms)
    assert failed.first_us is None
    assert failed.outcome.kind is FailureKind.RESOURCES
    assert (small.outcome.samples, large.outcome.samples) == (3, 3)
    fastest_us = min(small.first_us, large.first_us)
    refusing = EntryTerms(slow_ratio=1.0, samples=3, long_samples=1, long_us=1e9, best_us=fastest_us / 1000)
    assert [end.outcome for end in opened.enter_kernels(Role.GATE_UP, [SMALL, LARGE], refusing)] == [None, None]
    assert list(opened.verify_kernels(Role.GATE_UP, [SMALL, LARGE])) == [None, None]
    timed = list(opened.time_and_recheck_kernels(Role.GATE_UP, [SMALL, LARGE], 9))
    assert [outcome.samples for outcome in timed] == [9, 9]


def test_layers_are_verified_and_timed_against_each_other(opened):
    assert all(opened.verify_layer(plan) is None for plan in PLANS)
    outcomes = opened.time_layers(PLANS, 6)
    assert [outcome.samples for outcome in outcomes] == [6, 6]
    for outcome in outcomes:
        assert outcome.median_us > opened.bound_us()
        assert outcome.spread_us < outcome.median_us


def test_graphs_stay_from_heat_to_heat_and_leave_no_memory_behind(opened):
    import torch

    def heats():
        for plans in (PLANS, PLANS[:1], PLANS, PLANS[1:]):
            assert all(isinstance(outcome, Measured) for outcome in opened.time_layers(plans, 2))
        return torch.cuda.memory_allocated()

    before = heats()
    assert all(heats() == before for _ in range(3))
    assert opened.open(64) is None
    assert opened.open(64) is None
    assert torch.cuda.memory_allocated() < before + (64 << 20)


def test_layers_are_timed_where_fewer_and_where_more_experts_are_touched(backend):
    assert backend.open(1) is None
    assert not backend.time_rerouted(PLANS, 4)  # one token touches as many experts however it is routed
    assert backend.open(3) is None
    fewest, *_, most = backend.time_rerouted(PLANS, 20)
    for fewer, more in zip(fewest, most, strict=True):
        assert (fewer.samples, more.samples) == (20, 20)
        assert fewer.median_us < 1.05 * more.median_us


def test_routing_and_combine_have_times(opened):
    for outcome in (opened.time_routing(16), opened.time_combine()):
        assert isinstance(outcome, Measured), outcome
        assert outcome.median_us > 0.5


def test_nothing_is_compiled_while_layers_are_timed(opened):
    before = cache_entries()
    opened.time_layers(PLANS, 2)
    assert cache_entries() == before


def test_a_kernel_that_writes_nothing_is_wrong(opened, monkeypatch):
    from moetune.measure import problem

    monkeypatch.setattr(problem, "launch_all", lambda calls: None)
    failed = opened.verify_kernel(Role.GATE_UP, SMALL)
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.WRONG


def test_a_config_over_the_shared_memory_fails_alone(opened):
    big = MoEKernelConfig(
        structure=Structure.GATHER, block_m=128, block_n=128, block_k=128, num_warps=8, prefetch_distance=5
    )
    failed = opened.first_launch_us(Role.GATE_UP, big)
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.RESOURCES
    assert isinstance(opened.time_kernel(Role.GATE_UP, SMALL, 3), Measured)


def test_the_gpu_was_busy_for_most_of_a_timed_kernel(backend):
    assert backend.open(64) is None
    busy_s, asked_s = backend.busy(), backend.asked()
    outcome = backend.time_kernel(Role.GATE_UP, SMALL, 25)
    busy_s, asked_s = backend.busy() - busy_s, backend.asked() - asked_s
    assert 25 * outcome.median_us * 1e-6 < busy_s < asked_s
    assert busy_s > 0.5 * asked_s


def test_cold_times_are_steady_within_a_few_percent(backend):
    assert backend.open(64) is None
    one, two = (backend.time_kernel(Role.GATE_UP, SMALL, 25).median_us for _ in range(2))
    assert abs(one - two) < 0.1 * one + 1.0


def test_too_many_tokens_for_the_memory_is_one_sentence(backend, monkeypatch):
    from moetune.measure import cuda

    monkeypatch.setattr(cuda, "token_bytes", lambda shape, tokens: 1 << 45)
    failed = backend.open(64)
    assert failed.kind is FailureKind.RESOURCES
    assert "GiB are free" in failed.reason


def test_ceilings_are_those_of_a_real_gpu(backend):
    ceilings = backend.ceilings()
    assert 1e11 < ceilings.bytes_per_s < 2e13
    assert 2e13 < ceilings.flops < 5e15
    assert backend.ceilings() is ceilings


def test_clocks_were_read_while_timing(backend):
    assert backend.open(64) is None
    outcome = backend.time_kernel(Role.GATE_UP, SMALL, 5)
    assert outcome.issue_efficiency.source is Source.STATIC
    assert backend.clocks() is not None
