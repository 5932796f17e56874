"""One set of rows with its routing: both GEMMs launched over poisoned, guarded memory and compared with float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moetune.measure.compare import Reference, gemm_limit, is_match, why_gemm_differs
from moetune.measure.guarded import GuardedRows
from moetune.measure.inputs import ExpertWeights, KernelTruth, Rows, slot_order
from moetune.measure.verdict import Queued
from moetune.outcome import Failed, FailureKind
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.down.launch import DownOperands, down_calls
from moetune_kernels.fused_moe.layer import Weights, moe_from_logits
from moetune_kernels.gate_up.launch import gate_up_calls
from moetune_kernels.kernel_call import KernelCall, launch_all
from moetune_kernels.permute.order import SlotOrder
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

Calls = tuple[KernelCall, ...]


@dataclass
class Problem:
    """Inputs, truth and output memory of both GEMMs.

    Args:
        name: what a wrong kernel's reason calls it.
        shape: the layer.
        weights: its weights.
        truth: inputs and float32 outputs.
    """

    name: str
    shape: MoEShape
    weights: ExpertWeights
    truth: KernelTruth
    _orders: dict[int, SlotOrder] = field(default_factory=dict[int, SlotOrder])

    def __post_init__(self) -> None:
        slots, x = self.truth.topk_ids.numel(), self.truth.rows.x
        self._x, self._topk_weights = x.clone(), self.truth.topk_weights.clone()
        self._outputs = {
            Role.GATE_UP: GuardedRows((slots, self.shape.inter), x.dtype, x.device),
            Role.DOWN: GuardedRows((slots, self.shape.hidden), x.dtype, x.device),
        }
        routed = torch.zeros(slots, dtype=torch.bool, device=x.device)
        routed[self.truth.slots] = True
        self._unused = {  # gate-up writes in sorted positions, down in slot order
            Role.GATE_UP: torch.arange(self.truth.routed, slots, device=x.device),
            Role.DOWN: (~routed).nonzero().flatten(),
        }
        self._is_whole = self.truth.routed == slots
        y = self.truth.y if self._is_whole else self.truth.y[self.truth.slots]
        self._references = {Role.GATE_UP: Reference(self.truth.h), Role.DOWN: Reference(y)}
        self._before: torch.Tensor | None = None

    @property
    def h(self) -> torch.Tensor:
        """What gate-up writes: [S, I] in sorted positions."""
        return self._outputs[Role.GATE_UP].rows

    @property
    def y(self) -> torch.Tensor:
        """What down writes: [S, H] in slot order."""
        return self._outputs[Role.DOWN].rows

    def order(self, block_m: int) -> SlotOrder:
        """Return the slot order at one ``block_m``, made on first use."""
        if block_m not in self._orders:
            self._orders[block_m] = slot_order(self.shape, self.truth.topk_ids, block_m)
            self._before = None
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

    def restore(self) -> bool:
        """Put back what a kernel changed of its inputs, weights aside; say whether there was anything."""
        kept = self._inputs()
        differ = torch.stack([(_bits(now) != _bits(before)).any() for now, before in kept]).tolist()
        for (now, before), differs in zip(kept, differ, strict=True):
            if differs:
                now.copy_(before)
        return any(differ)

    def _inputs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return every input but the weights beside what it held at first."""
        truth = self.truth
        return [
            (truth.rows.x, self._x),
            (truth.topk_weights, self._topk_weights),
            (truth.h_in[: truth.routed], truth.h.to(truth.h_in.dtype)),
            *((order.slots[: truth.routed], truth.slots.to(order.slots.dtype)) for order in self._orders.values()),
        ]

    def _are_inputs_changed(self) -> torch.Tensor:
        """Return on the device whether :meth:`restore` would find anything: 0 in float32 when not."""
        truth = self.truth
        if self._before is None:
            self._before = torch.cat([_bits(before) for _, before in self._inputs()])
        slots = [order.slots[: truth.routed] for order in self._orders.values()]
        now = [truth.rows.x, truth.topk_weights, truth.h_in[: truth.routed], *slots]
        return (torch.cat([_bits(one) for one in now]) != self._before).sum(dtype=torch.float32)

    def poison(self, role: Role) -> None:
        """Fill one GEMM's output and the bands around it with NaN."""
        self._outputs[role].poison()

    def queue(self, role: Role, config: MoEKernelConfig, launches: int = 1) -> Queued:
        """Launch over NaN, back to back where ``launches`` is more than one, and queue a look at what the last one left.

        Launch nothing else into this problem before the verdict was read.
        """
        self._launch(role, config, launches)
        return self.look(role, self.name)

    def queue_apart(self, role: Role, config: MoEKernelConfig) -> Queued:
        """Do the same on inputs of a problem that is small: a kernel that writes to them is wrong, and they are put back."""
        self._launch(role, config, 1)
        left = self.look(role, self.name, self._are_inputs_changed())

        def judge(values: Sequence[float]) -> Failed | None:
            *numbers, are_inputs_changed = values
            wrong = left.judge(numbers)
            if are_inputs_changed and self.restore() and wrong is None:
                return Failed(FailureKind.WRONG, f"{role.value}: {self.name}: wrote to its inputs")
            return wrong

        return Queued(left.numbers, judge)

    def queue_group(self, role: Role, config: MoEKernelConfig, launches: int) -> Queued:
        """Queue launches as :meth:`queue` does, with a copy of what they left: the next group may follow at once."""
        left, output = self.queue(role, config, launches), self._outputs[role]
        copied = output.copy()

        def judge(numbers: Sequence[float]) -> Failed | None:
            if not self._is_right(numbers):
                output.hold(copied)
            return left.judge(numbers)

        return Queued(left.numbers, judge)

    def look(self, role: Role, found_by: str, *more: torch.Tensor) -> Queued:
        """Queue a look at what one GEMM's output holds now; its verdict, where it is not right, is :meth:`judge`'s.

        ``more`` are numbers that are read with it and stand behind its own.
        """
        written = self._outputs[role].is_written(self._unused[role])
        found = self._references[role].numbers(self._rows(role), gemm_limit(self.shape.format), written, *more)

        def judge(numbers: Sequence[float]) -> Failed | None:
            return None if self._is_right(numbers) else self.judge(role, found_by)

        return Queued(found, judge)

    def _is_right(self, numbers: Sequence[float]) -> bool:
        *found, is_written = numbers
        return is_match(found, gemm_limit(self.shape.format)) and not is_written

    def judge(self, role: Role, found_by: str) -> Failed | None:
        """Compare what one GEMM's output holds now: every routed row with float32, everything else with the poison."""
        want = self._references[role].want
        differs = why_gemm_differs(self._rows(role), want, self.shape.format)
        problem = differs or self._outputs[role].why_written(self._unused[role])
        return None if problem is None else Failed(FailureKind.WRONG, f"{role.value}: {found_by}: {problem}")

    def _launch(self, role: Role, config: MoEKernelConfig, launches: int) -> None:
        calls = self.gemm(role, config)
        self.poison(role)
        for _ in range(launches):
            launch_all(calls)

    def _rows(self, role: Role) -> torch.Tensor:
        """Return the routed rows of one GEMM's output."""
        if role is Role.GATE_UP:
            return self.h[: self.truth.routed]
        return self.y if self._is_whole else self.y[self.truth.slots]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16).flatten()  # NaN differs from itself, its bits do not


def run_layer(shape: MoEShape, weights: ExpertWeights, rows: Rows, plan: LayerPlan) -> torch.Tensor:
    """Run the whole layer, logits to output [T, H], as the runtime does."""
    return moe_from_logits(rows.x, Weights(weights.w13, weights.w2), rows.logits, (shape.top_k, True), plan)
