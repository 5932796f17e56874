"""Problems that no random rows pose: odd routings and values, a few hundred rows each, shared by every token count.

A kernel is compiled once for all token counts, so each meets these once. They touch at most four experts, because
weights are what a launch of a few rows reads; only one of them reads all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from moetune.measure.inputs import ExpertWeights, Rows, layer_truth, make_rows, routed_truth
from moetune.measure.layer_verdict import LayerTruth
from moetune.measure.problem import Problem, run_layer
from moetune.measure.verdict import Queued
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

NOT_ROUTED = -1
LARGE = 32.0  # times a normal x: gates beyond 100, whose exp overflows float32, and products that fp16 still holds
LAYER_TOKENS = 37
SURE = 32.0  # added to a logit, so that the router chooses that expert


@dataclass(frozen=True, slots=True)
class OddCase:
    """One odd problem.

    Args:
        name: what a reason calls it.
        experts: of every slot, before they are shuffled.
        scale: what the rows are multiplied with.
        zero_tokens: rows of zeros.
        idle_tokens: more tokens, of which no slot is routed.
    """

    name: str
    experts: tuple[int, ...]
    scale: float = 1.0
    zero_tokens: int = 0
    idle_tokens: int = 0


def odd_cases(shape: MoEShape) -> list[OddCase]:
    """Return every case that a layer of this shape can pose."""
    experts, last = shape.local_experts, shape.local_experts - 1
    some = sorted({0, experts // 3, 2 * experts // 3, last})
    mixed = {owner: 5 + 4 * place for place, owner in enumerate(some)}
    outside = [NOT_ROUTED, experts, 2**31 - 1, -(2**31)]
    cases = [
        _case(shape, "a row past full blocks", _ragged(some)),
        _case(shape, "all slots to expert 0", {0: 200}),
        OddCase("ids outside 0..E-1", _padded([*_slots(mixed), *outside], shape.top_k), idle_tokens=2),
        _case(shape, "every expert once", dict.fromkeys(range(experts), 1)),
        OddCase("large values and a row of zeros", _padded(_slots(mixed), shape.top_k), scale=LARGE, zero_tokens=1),
        OddCase("one token", tuple(some[place % len(some)] for place in range(shape.top_k))),
    ]
    if experts > 1:
        empty = 1 if experts > 2 else 0
        cases.append(_case(shape, f"expert {empty} left empty", {2: 9, 0: 17, last: 33} if empty else {1: 33}))
    return cases


def _ragged(some: Sequence[int]) -> Mapping[int, int]:
    """Return counts around the largest block: the last expert, whose last block ends the output, has a row too many."""
    return {some[-1]: 257} | dict(zip(some[:-1], (255, 256, 1), strict=False))


def _case(shape: MoEShape, name: str, counts: Mapping[int, int]) -> OddCase:
    slots = _slots(counts)
    slots += [list(counts)[-1]] * (-len(slots) % shape.top_k)  # every token needs as many: the last named takes more
    return OddCase(name, tuple(slots))


def _slots(counts: Mapping[int, int]) -> list[int]:
    return [owner for owner, count in counts.items() for _ in range(count)]


def _padded(slots: Sequence[int], top_k: int) -> tuple[int, ...]:
    return (*slots, *[NOT_ROUTED] * (-len(slots) % top_k))


@dataclass
class OddProblems:
    """The odd problems of one layer, made on first use; remembers which kernels and plans passed.

    Args:
        shape: the layer.
        weights: its weights.
        seed: of the rows.
    """

    shape: MoEShape
    weights: ExpertWeights
    seed: int
    _problems: list[Problem] | None = None
    _layers: list[tuple[str, Rows, LayerTruth]] | None = None
    _right_kernels: set[tuple[Role, MoEKernelConfig]] = field(default_factory=set[tuple[Role, MoEKernelConfig]])
    _right_plans: set[LayerPlan] = field(default_factory=set[LayerPlan])

    def queue_gemm(self, role: Role, config: MoEKernelConfig) -> list[Queued]:
        """Pose every problem to one kernel, unless it passed before."""
        if (role, config) in self._right_kernels:
            return []
        return [problem.queue_apart(role, config) for problem in self.problems()]

    def queue_layer(self, plan: LayerPlan) -> list[Queued]:
        """Pose every problem to both kernels of a plan, and the odd routings to the whole, unless it passed before."""
        if plan in self._right_plans:
            return []
        kernels = [queued for role in Role for queued in self.queue_gemm(role, plan.config(role))]
        layers = [
            truth.look(run_layer(self.shape, self.weights, rows, plan), name) for name, rows, truth in self.layers()
        ]
        return [*kernels, *layers]

    def passed_gemm(self, role: Role, config: MoEKernelConfig) -> None:
        """Pose nothing more to a kernel that was right on every problem."""
        self._right_kernels.add((role, config))

    def passed_layer(self, plan: LayerPlan) -> None:
        """Pose nothing more to a plan that was right on every problem, nor to its kernels."""
        self._right_plans.add(plan)
        for role in Role:
            self.passed_gemm(role, plan.config(role))

    def problems(self) -> list[Problem]:
        """Return the problems of both GEMMs, made on first use."""
        if self._problems is None:
            self._problems = [self._make(case, self.seed + place) for place, case in enumerate(odd_cases(self.shape))]
        return self._problems

    def layers(self) -> list[tuple[str, Rows, LayerTruth]]:
        """Return name, rows and truth of every problem of a whole layer, made on first use."""
        if self._layers is None:
            self._layers = [
                (name, rows, LayerTruth(layer_truth(self.shape, self.weights, rows), self.shape.format))
                for name, rows in self._rows()
            ]
        return self._layers

    def _make(self, case: OddCase, seed: int) -> Problem:
        device, top_k = self.weights.w2.device, self.shape.top_k
        tokens = len(case.experts) // top_k + case.idle_tokens
        generator = torch.Generator().manual_seed(seed)
        rows = make_rows(self.shape, tokens, device, seed)
        rows.x.mul_(case.scale)
        rows.x[: case.zero_tokens].zero_()
        owners = torch.full((tokens * top_k,), NOT_ROUTED, dtype=torch.int32)
        shuffled = torch.randperm(len(case.experts), generator=generator)
        owners[: len(shuffled)] = torch.tensor(case.experts, dtype=torch.int32)[shuffled]
        topk_ids = owners.view(tokens, top_k).to(device)
        # Not normalised: with one expert per token the router's own are all 1, and a weight applied twice would not show.
        topk_weights = (0.25 + torch.rand((tokens, top_k), generator=generator)).to(device)
        truth = routed_truth(self.weights, rows, topk_weights, topk_ids)
        return Problem(case.name, self.shape, self.weights, truth)

    def _rows(self) -> Iterator[tuple[str, Rows]]:
        """Return rows whose logits send all tokens the same way, and one token alone."""
        device, shape = self.weights.w2.device, self.shape
        same = make_rows(shape, LAYER_TOKENS, device, self.seed)
        same.logits[:, : shape.top_k] += SURE
        yield "all tokens to the same experts", same
        yield "one token", make_rows(shape, 1, device, self.seed + 1)
