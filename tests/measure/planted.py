"""Both GEMMs and the layer in plain torch, launched as kernels are, each right or with one planted fault."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from moetune.measure import problem
from moetune.measure.inputs import kernel_truth, make_rows, make_weights
from moetune.measure.odd import OddProblems
from moetune.measure.open_count import OpenCount
from moetune_kernels.combine import combine_reference
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.kernel_call import KernelCall
from moetune_kernels.permute import permute_reference
from moetune_kernels.plan import LayerPlan
from moetune_kernels.route import route_reference
from moetune_kernels.shape import MoEShape

CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=16, block_k=16)
PLAN = LayerPlan(gate_up=CONFIG, down=CONFIG)
CPU = torch.device("cpu")
ALL_TOUCHED = MoEShape(hidden=64, inter=48, local_experts=4, top_k=2), 16
SOME_TOUCHED = MoEShape(hidden=64, inter=48, local_experts=24, top_k=2), 3
ONE_OF_TWO_RANKS = MoEShape(hidden=64, inter=48, local_experts=4, experts=8, top_k=2), 16
TIMED_LAUNCHES = 12
TIMED_REPLAYS = 18


@dataclass
class Launch:
    """One launch: out[p's row] = f(rows[p]) for every position p of every block."""

    role: Role
    source: torch.Tensor  # x [T, H], or h [S, I] in sorted positions
    weights: torch.Tensor
    topk_weights: torch.Tensor | None
    order: object
    out: torch.Tensor
    number: int = 0  # of all launches of this kernel
    in_a_row: int = 0  # on these operands
    cold: bool = False

    @property
    def top_k(self):
        return len(self.out) // len(self.source) if self.role is Role.GATE_UP else self.topk_weights.shape[1]

    @property
    def tokens(self):
        return len(self.out) // self.top_k

    @property
    def routed(self):
        return int(self.order.expert_offsets[-1])

    @property
    def counts(self):
        return self.order.expert_offsets.diff().tolist()

    def blocks(self):
        """Expert by expert, all its blocks in one: the tests would take twenty times as long block by block."""
        offsets = self.order.expert_offsets.tolist()
        for expert, (start, end) in enumerate(itertools.pairwise(offsets)):
            if end > start:
                yield expert, torch.arange(start, end)

    def places(self, positions):
        return positions if self.role is Role.GATE_UP else self.order.slots[positions].long()


class Right:
    """A kernel without a fault; each fault overrides one step."""

    def run(self, launch):
        for expert, positions in launch.blocks():
            self.block(launch, expert, positions)

    def block(self, launch, expert, positions):
        self.store(launch, positions, self.values(launch, expert, positions))

    def store(self, launch, positions, values):
        launch.out[launch.places(positions)] = values.to(launch.out.dtype)

    def values(self, launch, expert, positions):
        slots = launch.order.slots[positions].long()
        if launch.role is Role.GATE_UP:
            rows = launch.source[slots // launch.top_k]
            gate, up = self.product(rows, launch.weights[expert]).chunk(2, dim=1)
            return self.activated(gate, up)
        weight = launch.topk_weights.flatten()[slots, None]
        return self.weighted(self.product(launch.source[positions], launch.weights[expert]), weight)

    def product(self, rows, weights):
        return rows.float() @ weights.float().t()

    def activated(self, gate, up):
        return torch.nn.functional.silu(gate) * up

    def weighted(self, values, weight):
        return values * weight


class Planted:
    """A kernel that runs one fault; takes the place of both GEMMs' launches.

    ``cold`` is what a flush before a launch would be: set while the test times.
    """

    def __init__(self, fault, roles=tuple(Role)):
        self.fault, self.roles, self.right = fault, roles, Right()
        self.cold, self.number, self.in_a_row, self.last = False, 0, 0, None

    def install(self, monkeypatch):
        monkeypatch.setattr(problem, "gate_up_calls", self.gate_up_calls)
        monkeypatch.setattr(problem, "down_calls", self.down_calls)
        monkeypatch.setattr(problem, "moe_from_logits", right_layer)
        monkeypatch.setattr(problem, "slot_order", lambda shape, ids, m: permute_reference(ids, shape.local_experts, m))
        return self

    def gate_up_calls(self, x, w13, order, h, config):
        return self.calls(Launch(Role.GATE_UP, x, w13, None, order, h))

    def down_calls(self, operands, order, config):
        return self.calls(Launch(Role.DOWN, operands.h, operands.w2, operands.topk_weights, order, operands.y))

    def calls(self, launch):
        return (KernelCall(self, (1,), (launch,), {}),)

    def __getitem__(self, grid):
        return self.launch

    def launch(self, launch):
        self.number += 1
        operands = launch.source.data_ptr(), launch.out.data_ptr()
        self.in_a_row = self.in_a_row + 1 if operands == self.last else 1
        self.last = operands
        fault = self.fault if launch.role in self.roles else self.right
        fault.run(replace(launch, number=self.number, in_a_row=self.in_a_row, cold=self.cold))


def rounded(values, like):
    return values.to(like.dtype).float()


def layer_of(x, weights, topk_weights, topk_ids):
    """The layer with 16-bit h and y, as kernels run it."""
    flat, h_in, y = topk_ids.flatten(), None, torch.zeros((topk_ids.numel(), x.shape[1]))
    for expert in range(len(weights.w2)):
        slots = (flat == expert).nonzero().flatten()
        gate, up = (x[slots // topk_ids.shape[1]].float() @ weights.w13[expert].float().t()).chunk(2, dim=1)
        h_in = rounded(torch.nn.functional.silu(gate) * up, x)
        y[slots] = rounded(h_in @ weights.w2[expert].float().t() * topk_weights.flatten()[slots, None], x)
    return combine_reference(y, topk_ids, len(weights.w2)).to(x.dtype)


def right_layer(x, weights, logits, routing, plan):
    return layer_of(x, weights, *route_reference(logits, routing[0]))


_MADE = {}


def opened(setup):
    """Open a token count; weights, truths and odd problems are made once per setup, nobody has passed them yet."""
    shape, tokens = setup
    if setup not in _MADE:
        weights = make_weights(shape, CPU, 3)
        _MADE[setup] = (
            weights,
            kernel_truth(shape, weights, make_rows(shape, tokens, CPU, 5)),
            OddProblems(shape, weights, 11),
        )
    weights, truth, odd = _MADE[setup]
    truth = replace(truth, rows=replace(truth.rows, x=truth.rows.x.clone()), h_in=truth.h_in.clone())
    for odd_problem in odd.problems():
        odd_problem.restore()
    return OpenCount(shape, weights, truth, 5, OddProblems(shape, weights, 11, odd.problems(), odd.layers()))


def verdict(count, kernel, role):
    """What a race asks: verify, time, recheck."""
    wrong = count.verify_gemm(role, CONFIG)
    if wrong is not None:
        return wrong
    launch = count.timed_gemm(role, CONFIG)
    kernel.cold = True
    for _ in range(TIMED_LAUNCHES):
        launch()
    kernel.cold = False
    return count.recheck_gemm(role, CONFIG)


def layer_verdict(count):
    """What the finals ask: verify, time, recheck."""
    wrong = count.verify_layer(PLAN)
    if wrong is not None:
        return wrong
    run = count.layer(PLAN)
    for _ in range(TIMED_REPLAYS):
        out = run()
    (wrong,) = count.recheck_layers([out])
    return wrong
