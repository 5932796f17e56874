"""Planted Triton kernels on a real GPU: the live backend refuses each by the check that is there for it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from moetune.measure import problem
from moetune.outcome import FailureKind, Measured
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.gate_up.epilogue import store_swiglu
from moetune_kernels.kernel_call import KernelCall
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

pytestmark = [pytest.mark.gpu, pytest.mark.plain_memory]

SHAPE = MoEShape(hidden=1024, inter=512, local_experts=16, top_k=4)
CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
TMA = MoEKernelConfig(structure=Structure.TMA, block_m=64, block_n=64, block_k=64, num_warps=4)
TMA_PERMUTE = MoEKernelConfig(structure=Structure.TMA_PERMUTE, block_m=64, block_n=64, block_k=64, num_warps=4)
HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="descriptors need compute capability 9.0",
)


@triton.jit
def product(x_ptr, gate_ptr, slots_ptr, position, end, cols, H, I, K, DEPTH, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_K: tl.constexpr):  # fmt: skip
    """Return the gate and up tiles [BLOCK_M, BLOCK_N], summed over the first DEPTH of H."""
    row = (tl.load(slots_ptr + tl.minimum(position, end - 1)) // K).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        x = tl.load(x_ptr + row[:, None] * H + k + inner[None, :])
        weights = gate_ptr + cols[None, :] * H + k + inner[:, None]
        gate = tl.dot(x, tl.load(weights), gate)
        up = tl.dot(x, tl.load(weights + I * H), up)
    return gate, up


@triton.jit
def planted_kernel(
    x_ptr, w13_ptr, h_ptr, scratch_ptr, slots_ptr, block_expert_ptr, block_row_ptr, block_end_ptr, num_blocks_ptr,
    H, I, K, DEPTH, PAST, RACES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gate-up, one tile a program: sums over DEPTH, writes PAST rows beyond its own, or adds up without a barrier."""
    columns = I // BLOCK_N
    block, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    if block >= tl.load(num_blocks_ptr):
        return
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    end = tl.load(block_end_ptr + block)
    position = tl.load(block_row_ptr + block) + tl.arange(0, BLOCK_M)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    gate, up = product(
        x_ptr, w13_ptr + expert * (2 * I * H), slots_ptr, position, end, cols, H, I, K, DEPTH, BLOCK_M, BLOCK_N, BLOCK_K
    )
    if RACES:
        # All tiles pass their result through one scratch tile; nothing keeps another program from writing in between.
        scratch = scratch_ptr + tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(scratch, gate)
        for _ in range(64):
            gate = tl.load(scratch, volatile=True)
    store_swiglu(h_ptr, gate, up, position, end + PAST, cols, I)


class Fault:
    """Stands in for gate-up's launcher with one fault of the planted kernel."""

    def __init__(self, depth=1.0, past=0, races=False):
        self.depth, self.past, self.races = depth, past, races

    def __call__(self, x, w13, order, h, config):
        hidden, inter = x.shape[1], h.shape[1]
        blocks = (order.block_expert, order.block_row, order.block_end, order.num_blocks)
        sizes = (hidden, inter, h.shape[0] // x.shape[0], int(self.depth * hidden), self.past)
        tile = (config.block_m, config.block_n, config.block_k)
        scratch = torch.zeros(config.block_m * config.block_n, device=x.device)
        args = (x, w13, h, scratch, order.slots, *blocks, *sizes, self.races, *tile)
        return (KernelCall(planted_kernel, (order.max_blocks * (inter // config.block_n),), args, {"num_warps": 4}),)


@pytest.fixture(scope="module")
def backend():
    from moetune.measure.cuda import CudaBackend

    backend = CudaBackend(SHAPE, 0, workers=2)
    try:
        assert backend.open(100) is None
        yield backend
    finally:
        backend.close()


def verdict(backend, role=Role.GATE_UP, config=CONFIG):
    """What a race asks: verify, time, recheck."""
    wrong = backend.verify_kernel(role, config)
    if wrong is not None:
        return wrong
    assert isinstance(backend.time_kernel(role, config, 25), Measured)
    return backend.recheck_kernel(role, config)


@pytest.fixture
def plant(backend, monkeypatch):
    def plant(**fault):
        backend._odd._right_kernels.clear()
        monkeypatch.setattr(backend, "_instructions", lambda role, config: None)  # of another kernel than is planted
        monkeypatch.setattr(problem, "gate_up_calls", Fault(**fault))

    return plant


def test_the_planted_kernel_without_a_fault_passes(backend, plant):
    plant()
    assert verdict(backend) is None


def test_a_kernel_that_drops_the_tail_of_the_inner_dimension_is_refused(backend, plant):
    plant(depth=15 / 16)
    wrong = verdict(backend)
    assert wrong.kind is FailureKind.WRONG
    assert wrong.reason.startswith("gate_up: timing inputs: relative L2 error")


def test_a_kernel_that_writes_one_row_beyond_is_refused(backend, plant):
    plant(past=1)
    wrong = verdict(backend)
    assert wrong.kind is FailureKind.WRONG
    assert wrong.reason.startswith("gate_up: ")


def test_a_race_without_a_barrier_is_refused(backend, plant):
    plant(races=True)
    wrong = verdict(backend)
    assert wrong.kind is FailureKind.WRONG
    assert wrong.reason.startswith("gate_up: ")


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    "config",
    [CONFIG, pytest.param(TMA, marks=HOPPER), pytest.param(TMA_PERMUTE, marks=HOPPER)],
    ids=lambda config: config.structure.value,
)
def test_every_structure_passes_every_check(backend, role, config):
    if role is Role.DOWN and config.structure is Structure.TMA_PERMUTE:
        pytest.skip("down has no such structure")
    for tokens in (1, 100, 3000):
        assert backend.open(tokens) is None
        assert verdict(backend, role, config) is None
    assert backend.open(100) is None


def test_a_layer_is_compared_with_what_its_last_replay_left(backend, monkeypatch):
    plan = LayerPlan(gate_up=CONFIG, down=CONFIG)
    right = problem.moe_from_logits
    assert backend.verify_layer(plan) is None
    assert isinstance(backend.time_layers([plan, plan], 6)[1], Measured)
    assert backend.open(100) is None  # graphs stay from heat to heat of a count
    monkeypatch.setattr(problem, "moe_from_logits", lambda *args: right(*args) * 1.1)
    wrong, _ = backend.time_layers([plan, plan], 6)
    assert wrong.kind is FailureKind.WRONG
    assert wrong.reason.startswith("layer: after timing: relative L2 error")


def test_a_check_of_a_few_rows_takes_about_a_millisecond(backend):
    assert backend.open(16) is None
    backend.verify_kernel(Role.DOWN, CONFIG)  # makes the odd problems
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        assert backend.verify_kernel(Role.DOWN, CONFIG) is None
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) / 10 < 3.0
