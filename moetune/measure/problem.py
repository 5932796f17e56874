"""One set of rows with its routing: both GEMMs launched over poisoned, guarded memory and compared with float32."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moetune.measure.compare import why_gemm_differs
from moetune.measure.guarded import GuardedRows
from moetune.measure.inputs import ExpertWeights, KernelTruth, Rows, slot_order
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
        truth = self.truth
        kept = [
            (truth.rows.x, self._x),
            (truth.topk_weights, self._topk_weights),
            (truth.h_in[: truth.routed], truth.h.to(truth.h_in.dtype)),
            *((order.slots[: truth.routed], truth.slots.to(order.slots.dtype)) for order in self._orders.values()),
        ]
        differ = torch.stack([_bits_differ(now, before) for now, before in kept]).tolist()
        for (now, before), differs in zip(kept, differ, strict=True):
            if differs:
                now.copy_(before)
        return any(differ)

    def poison(self, role: Role) -> None:
        """Fill one GEMM's output and the bands around it with NaN."""
        self._outputs[role].poison()

    def verify(self, role: Role, config: MoEKernelConfig, launches: int = 1) -> Failed | None:
        """Launch over NaN, back to back where ``launches`` is more than one, and judge what the last one left."""
        calls = self.gemm(role, config)
        self.poison(role)
        for _ in range(launches):
            launch_all(calls)
        return self.judge(role, self.name)

    def verify_apart(self, role: Role, config: MoEKernelConfig) -> Failed | None:
        """Do the same on inputs of a problem that is small: a kernel that writes to them is wrong, and they are put back."""
        wrong = self.verify(role, config)
        if self.restore() and wrong is None:
            return Failed(FailureKind.WRONG, f"{role.value}: {self.name}: wrote to its inputs")
        return wrong

    def judge(self, role: Role, found_by: str) -> Failed | None:
        """Compare what one GEMM's output holds now: every routed row with float32, everything else with the poison."""
        problem = self._why_differs(role) or self._outputs[role].why_written(self._unused[role])
        return None if problem is None else Failed(FailureKind.WRONG, f"{role.value}: {found_by}: {problem}")

    def _why_differs(self, role: Role) -> str | None:
        truth = self.truth
        if role is Role.GATE_UP:
            got, want = self.h[: truth.routed], truth.h
        elif truth.routed == len(self.y):
            got, want = self.y, truth.y
        else:
            got, want = self.y[truth.slots], truth.y[truth.slots]
        return why_gemm_differs(got, want, self.shape.format)


def _bits_differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.view(torch.uint8) != other.view(torch.uint8)).any()  # NaN differs from itself, its bits do not


def run_layer(shape: MoEShape, weights: ExpertWeights, rows: Rows, plan: LayerPlan) -> torch.Tensor:
    """Run the whole layer, logits to output [T, H], as the runtime does."""
    return moe_from_logits(rows.x, Weights(weights.w13, weights.w2), rows.logits, (shape.top_k, True), plan)
