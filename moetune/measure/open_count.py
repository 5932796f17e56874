"""One token count, opened: its inputs, its truth, every launch that a trial may time, and every check of its output."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moetune.measure.inputs import (
    ExpertWeights,
    KernelTruth,
    Rows,
    kernel_truth,
    make_rows,
    other_routings,
)
from moetune.measure.layer_verdict import LayerTruth
from moetune.measure.odd import OddProblems
from moetune.measure.problem import Calls, Problem, run_layer
from moetune.measure.router import Router
from moetune.measure.timer import Launch
from moetune.measure.verdict import Queued, first_wrong, verdicts
from moetune.outcome import Failed
from moetune_kernels.combine import combine_reference
from moetune_kernels.combine.launch import combine_calls
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.fused_moe.routing import routing_calls
from moetune_kernels.kernel_call import launch_all
from moetune_kernels.permute.order import SlotOrder
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

OTHER_SEED_OFFSET = 1_000_003  # rows that are never timed
ROUTING_SEED_OFFSET = 2_000_003  # layers are timed under routings that chose none of their kernels
ODD_SEED_OFFSET = 3_000_017
# Slots up to which kernels meet a second seed at the very size that is timed. Above it the reference takes seconds per
# sweep; there they meet other seeds in the odd problems, and as part of a layer at that size too.
OTHER_SEED_SLOTS = 1024
# Launches back to back before each comparison of a burst. Groups differ in length, so that a fault of every second or
# fourth launch does not always hide behind a right one.
BURST = (2, 1, 4, 3)
# Of traffic and of work, that a burst is cut to: 2 ms of an H200. A launch over half of that has no burst: it moves the
# whole L2 many times, so none that follows another finds anything of it there.
BURST_BYTES, BURST_FLOPS = 8e9, 1.5e12

_WEIGHT_BYTES = 2


@dataclass
class OpenCount:
    """Everything that trials of one token count share.

    Args:
        shape: the layer.
        weights: its weights.
        truth: inputs and float32 outputs of both GEMMs.
        seed: of the rows.
        odd: the problems that all token counts share; made for this one alone when None.
        router: what routed the rows, and routes all others but the odd ones; uniform when None.
    """

    shape: MoEShape
    weights: ExpertWeights
    truth: KernelTruth
    seed: int
    odd: OddProblems | None = None
    router: Router | None = None
    _other: Problem | None = None
    _other_layer: tuple[Rows, LayerTruth] | None = None
    _layer_truth: LayerTruth | None = None
    _routings: list[torch.Tensor] | None = None
    _written: tuple[Role, MoEKernelConfig] | None = None

    def __post_init__(self) -> None:
        self.timed = Problem("timing inputs", self.shape, self.weights, self.truth)
        self.odd = self.odd or OddProblems(self.shape, self.weights, self.seed + ODD_SEED_OFFSET)

    @property
    def tokens(self) -> int:
        """T."""
        return self.truth.rows.x.shape[0]

    # what is timed

    def order(self, block_m: int) -> SlotOrder:
        """Return the slot order at one ``block_m``, made on first use."""
        return self.timed.order(block_m)

    def gemm(self, role: Role, config: MoEKernelConfig) -> Calls:
        """Return the launches of one GEMM, see :meth:`moetune.measure.problem.Problem.gemm`."""
        return self.timed.gemm(role, config)

    def timed_gemm(self, role: Role, config: MoEKernelConfig) -> Launch:
        """Return the launch of one GEMM into poisoned memory, for :meth:`recheck_gemm` once it was timed."""
        calls = self.gemm(role, config)
        self.timed.poison(role)
        self._written = role, config
        return lambda: launch_all(calls)

    def routing(self, block_m: int) -> Launch:
        """Return the launch of route and permute at one ``block_m``, into an order of its own."""
        topk_ids, topk_weights = torch.empty_like(self.truth.topk_ids), torch.empty_like(self.truth.topk_weights)
        order = SlotOrder.empty(topk_ids.numel(), self.shape.local_experts, block_m, topk_ids.device)
        calls = routing_calls(
            self.truth.rows.logits, (topk_weights, topk_ids), self.shape.local_experts, order, renormalize=True
        )
        return lambda: launch_all(calls)

    def combine(self) -> Launch:
        """Return the launch of combine over zeros, whatever down left there."""
        out = torch.empty_like(self.truth.rows.x)
        y = self.timed.y.zero_()
        calls = combine_calls(y, self.truth.topk_ids, self.shape.local_experts, out)
        return lambda: launch_all(calls)

    def layer(self, plan: LayerPlan, logits: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
        """Return the whole layer, logits to output; other ``logits`` [T, E_total] than the rows' own route it anew."""
        rows = self.truth.rows if logits is None else Rows(self.truth.rows.x, logits)
        return lambda: run_layer(self.shape, self.weights, rows, plan)

    def other_routings(self) -> list[torch.Tensor]:
        """Return router logits that touch fewer or more experts than most draws do, made on first use."""
        if self._routings is None:
            device, seed = self.truth.rows.x.device, self.seed + ROUTING_SEED_OFFSET
            self._routings = other_routings(self.shape, self.tokens, device, seed, self.router)
        return self._routings

    # before timing

    def verify_gemm(self, role: Role, config: MoEKernelConfig) -> Failed | None:
        """Compare one kernel on the timing inputs, on another seed, and on every odd problem that it has not met.

        Kernels are timed before they are verified, so one may have written to the inputs of all: a wrong one is heard
        again where that shows.
        """
        wrong = self._verify_gemm(role, config)
        if wrong is not None and self.timed.restore():
            wrong = self._verify_gemm(role, config)
            self.timed.restore()
        return wrong

    def _verify_gemm(self, role: Role, config: MoEKernelConfig) -> Failed | None:
        assert self.odd is not None
        self._written = None
        wrong = first_wrong(
            [
                self.timed.queue(role, config),
                *self._queue_on_another_seed(role, config),
                *self.odd.queue_gemm(role, config),
            ]
        )
        if wrong is None:
            self.odd.passed_gemm(role, config)
        return wrong

    def _queue_on_another_seed(self, role: Role, config: MoEKernelConfig) -> list[Queued]:
        if self.truth.topk_ids.numel() > OTHER_SEED_SLOTS:
            return []
        return [self._other_problem().queue_apart(role, config)]

    def _other_problem(self) -> Problem:
        if self._other is None:
            truth = kernel_truth(self.shape, self.weights, self._other_rows())
            self._other = Problem("another seed", self.shape, self.weights, truth)
        return self._other

    def verify_layer(self, plan: LayerPlan) -> Failed | None:
        """Compare the layer on the timing inputs and on another seed, then it and its kernels on odd problems.

        The two run one after the other, each in memory that held NaN: a layer that returns what it returned last, for
        rows of the same size, is right on the first alone.
        """
        assert self.odd is not None
        wrong = first_wrong(
            [
                *self._queue_layer_on_timing_inputs(plan),
                *self._queue_layer_on_another_seed(plan),
                *self.odd.queue_layer(plan),
            ]
        )
        if wrong is None:
            self.odd.passed_layer(plan)
        return wrong

    def _queue_layer_on_timing_inputs(self, plan: LayerPlan) -> list[Queued]:
        self._poison_free_memory()
        out = run_layer(self.shape, self.weights, self.truth.rows, plan)
        return [self._truth_of_layer().look(out, "timing inputs")]

    def _queue_layer_on_another_seed(self, plan: LayerPlan) -> list[Queued]:
        rows, truth = self._other_rows_and_truth()
        self._poison_free_memory()
        return [truth.look(run_layer(self.shape, self.weights, rows, plan), "another seed")]

    def _other_rows_and_truth(self) -> tuple[Rows, LayerTruth]:
        if self._other_layer is None:
            if self.truth.topk_ids.numel() > OTHER_SEED_SLOTS:
                truth = kernel_truth(self.shape, self.weights, self._other_rows())
            else:
                truth = self._other_problem().truth  # its kernels' truth is there, or soon needed
            rows = Rows(truth.rows.x.clone(), truth.rows.logits)  # no kernel that is verified may write to these
            self._other_layer = rows, self._layer_truth_of(truth)
        return self._other_layer

    def _other_rows(self) -> Rows:
        device, seed = self.truth.rows.x.device, self.seed + OTHER_SEED_OFFSET
        return make_rows(self.shape, self.tokens, device, seed, self.router)

    def _poison_free_memory(self) -> None:
        """Fill the blocks that torch will hand to the layer for h, y and its output with NaN."""
        nan = float("nan")
        blocks = [torch.full_like(like, nan) for like in (self.timed.h, self.timed.y, self.truth.rows.x)]
        del blocks

    # after timing

    def recheck_gemm(self, role: Role, config: MoEKernelConfig) -> Failed | None:
        """Compare what the timed launches of a kernel left, as it stands, then bursts of it without a flush between."""
        assert self._written == (role, config), "recheck a kernel right after it was timed"
        wrong = self._judge_timed(role)
        if wrong is not None and not self.timed.restore():  # restored: an unverified kernel had spoilt the inputs
            return wrong
        return self._burst(role, config)

    def _judge_timed(self, role: Role) -> Failed | None:
        return first_wrong([self.timed.look(role, "after timing")])

    def _burst(self, role: Role, config: MoEKernelConfig) -> Failed | None:
        groups = BURST[: self._burst_groups(role)]
        found = verdicts([self.timed.queue_group(role, config, launches) for launches in groups])
        for launches, wrong in zip(groups, found, strict=True):
            if wrong is not None:
                return Failed(wrong.kind, f"{wrong.reason} (in a burst of {launches} launches after timing)")
        return None

    def _burst_groups(self, role: Role) -> int:
        """Return how many groups of a burst fit: a launch of 64 large experts reads 15 GB."""
        matrices = 2 if role is Role.GATE_UP else 1
        size = matrices * self.shape.hidden * self.shape.inter
        launches = min(
            BURST_BYTES / max(self.truth.touched * size * _WEIGHT_BYTES, 1),
            BURST_FLOPS / max(2 * self.truth.routed * size, 1),
        )
        return sum(total <= launches for total in itertools.accumulate(BURST))

    def recheck_layers(self, outs: Sequence[torch.Tensor]) -> list[Failed | None]:
        """Compare what the last timed replay of each layer left, [T, H] each."""
        return verdicts([self._truth_of_layer().look(out, "after timing") for out in outs])

    def _truth_of_layer(self) -> LayerTruth:
        if self._layer_truth is None:
            self._layer_truth = self._layer_truth_of(self.truth)
        return self._layer_truth

    def _layer_truth_of(self, truth: KernelTruth) -> LayerTruth:
        want = combine_reference(truth.y, truth.topk_ids, self.shape.local_experts)
        return LayerTruth(want, self.shape.format)
