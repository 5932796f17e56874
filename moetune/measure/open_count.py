"""One token count, opened: its inputs, its truth, and every launch that a trial may time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moetune.measure.inputs import (
    ExpertWeights,
    KernelTruth,
    Rows,
    layer_truth,
    make_rows,
    other_routings,
    slot_order,
)
from moetune.measure.router import Router
from moetune.measure.timer import Launch
from moetune.outcome import Failed, FailureKind
from moetune_kernels.combine.launch import combine_calls
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.down.launch import DownOperands, down_calls
from moetune_kernels.fused_moe.layer import Weights, moe_from_logits
from moetune_kernels.fused_moe.routing import routing_calls
from moetune_kernels.gate_up.launch import gate_up_calls
from moetune_kernels.kernel_call import KernelCall, launch_all
from moetune_kernels.match import match
from moetune_kernels.permute.order import SlotOrder
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

LAYER_SEED_OFFSET = 1_000_003  # the layer is verified on rows that no kernel of the race has seen
ROUTING_SEED_OFFSET = 2_000_003  # and timed under routings that chose none of its kernels

Calls = tuple[KernelCall, ...]


@dataclass
class OpenCount:
    """Everything that trials of one token count share.

    Args:
        shape: the layer.
        weights: its weights.
        truth: inputs and float32 outputs of both GEMMs.
        seed: of the rows.
        router: what routed the rows, and routes all others; uniform when None.
    """

    shape: MoEShape
    weights: ExpertWeights
    truth: KernelTruth
    seed: int
    router: Router | None = None
    _orders: dict[int, SlotOrder] = field(default_factory=dict[int, SlotOrder])
    _fresh: tuple[Rows, torch.Tensor] | None = None
    _routings: list[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        slots, x = self.truth.topk_ids.numel(), self.truth.rows.x
        self.h = torch.empty((slots, self.shape.inter), dtype=x.dtype, device=x.device)
        self.y = torch.zeros((slots, self.shape.hidden), dtype=x.dtype, device=x.device)

    @property
    def tokens(self) -> int:
        """T."""
        return self.truth.rows.x.shape[0]

    def order(self, block_m: int) -> SlotOrder:
        """Return the slot order at one ``block_m``, made on first use."""
        if block_m not in self._orders:
            self._orders[block_m] = slot_order(self.shape, self.truth.topk_ids, block_m)
        return self._orders[block_m]

    def gemm(self, role: Role, config: MoEKernelConfig) -> Calls:
        """Return the launches of one GEMM, its own preparations (a permuted copy) included; the GEMM is the last.

        Made anew each time: a permuted copy is too large to keep one per config.
        """
        order = self.order(config.block_m)
        if role is Role.GATE_UP:
            return gate_up_calls(self.truth.rows.x, self.weights.w13, order, self.h, config)
        operands = DownOperands(self.truth.h_in, self.weights.w2, self.truth.topk_weights, self.y)
        return down_calls(operands, order, config)

    def routing(self, block_m: int) -> Launch:
        """Return the launch of route and permute at one ``block_m``, into an order of its own."""
        topk_ids, topk_weights = torch.empty_like(self.truth.topk_ids), torch.empty_like(self.truth.topk_weights)
        order = SlotOrder.empty(topk_ids.numel(), self.shape.local_experts, block_m, topk_ids.device)
        calls = routing_calls(
            self.truth.rows.logits, (topk_weights, topk_ids), self.shape.local_experts, order, renormalize=True
        )
        return lambda: launch_all(calls)

    def combine(self) -> Launch:
        """Return the launch of combine over zeros, or over what down wrote last."""
        out = torch.empty_like(self.truth.rows.x)
        calls = combine_calls(self.y, self.truth.topk_ids, self.shape.local_experts, out)
        return lambda: launch_all(calls)

    def layer(self, plan: LayerPlan, logits: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
        """Return the whole layer, logits to output; other ``logits`` [T, E_total] than the rows' own route it anew."""
        x, weights = self.truth.rows.x, Weights(self.weights.w13, self.weights.w2)
        routed_by = self.truth.rows.logits if logits is None else logits
        return lambda: moe_from_logits(x, weights, routed_by, (self.shape.top_k, True), plan)

    def other_routings(self) -> list[torch.Tensor]:
        """Return router logits that touch fewer or more experts than most draws do, made on first use."""
        if self._routings is None:
            device, seed = self.truth.rows.x.device, self.seed + ROUTING_SEED_OFFSET
            self._routings = other_routings(self.shape, self.tokens, device, seed, self.router)
        return self._routings

    def verify_gemm(self, role: Role, config: MoEKernelConfig) -> Failed | None:
        """Launch over NaN and compare every routed row with float32."""
        output = self.h if role is Role.GATE_UP else self.y
        output.fill_(float("nan"))
        launch_all(self.gemm(role, config))
        if role is Role.GATE_UP:
            got, want = self.h[: self.truth.routed], self.truth.h
        elif self.truth.routed == len(self.y):
            got, want = self.y, self.truth.y
        else:
            got, want = self.y[self.truth.slots], self.truth.y[self.truth.slots]
        problem = match(got, want, self.shape.format)
        if role is Role.DOWN:
            self.y.zero_()  # combine is timed over it: NaN must not stay
        return None if problem is None else Failed(FailureKind.WRONG, f"{role.value}: {problem}")

    def verify_layer(self, plan: LayerPlan) -> Failed | None:
        """Run the layer on rows of another seed, in memory that held NaN, and compare with float32."""
        rows, want = self._fresh_rows()
        self._poison_free_memory()
        weights = Weights(self.weights.w13, self.weights.w2)
        got = moe_from_logits(rows.x, weights, rows.logits, (self.shape.top_k, True), plan)
        problem = match(got, want, self.shape.format)
        return None if problem is None else Failed(FailureKind.WRONG, f"layer: {problem}")

    def _fresh_rows(self) -> tuple[Rows, torch.Tensor]:
        if self._fresh is None:
            device, seed = self.truth.rows.x.device, self.seed + LAYER_SEED_OFFSET
            rows = make_rows(self.shape, self.tokens, device, seed, self.router)
            self._fresh = rows, layer_truth(self.shape, self.weights, rows)
        return self._fresh

    def _poison_free_memory(self) -> None:
        """Fill the blocks that torch will hand to the layer for h, y and its output with NaN."""
        nan = float("nan")
        blocks = [torch.full_like(like, nan) for like in (self.h, self.y, self.truth.rows.x)]
        del blocks
