"""Router logits whose top-k are wanted ids: a layer is timed from logits on, so a routing is a way to draw logits.

Ids are drawn first, then logits are made of which any correct router picks exactly these: the chosen experts stand in
steps that neither bf16 nor fp16 rounds away, all others well below. Uniform routing needs none of this: the top-k of
normal logits are uniform.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from moetune.errors import UsageError
from moetune.models.roofline import total_experts
from moetune.models.routing import Hot, Routing, Trace, Uniform, Zipf
from moetune_kernels.shape import MoEShape

STEP, JITTER = 0.25, 0.1  # between a token's chosen logits; bf16 is exact to 0.03 up to 8
GAP = 0.5  # between the lowest chosen logit and the highest other one, at least
LOWEST_WEIGHT = 20.0  # a recorded weight of zero is a logit this far below the largest: e**-20 of its share
CHUNK = 1 << 24  # logits that are drawn at once: float32 scores of 131,072 tokens and 1,024 experts take half a GiB


class Router(Protocol):
    """One way to draw router logits."""

    @property
    def rarest_share(self) -> float:
        """The share of all slots that the least used expert gets, of those that are used at all."""
        ...

    def logits(self, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        """Return logits [T, E_total] on the generator's device."""
        ...


def router_of(routing: Routing, shape: MoEShape, order_seed: int = 0) -> Router:
    """Return what draws the logits of ``routing`` for one layer.

    Args:
        routing: the distribution.
        shape: the layer; its router scores the experts of all ranks.
        order_seed: which experts are popular. One seed for a whole sweep: a model's popular experts are the same ones
            at every token count.

    Raises:
        UsageError: a trace that is gone, changed or of another layer.
    """
    total, top_k = total_experts(shape), shape.top_k
    if isinstance(routing, Uniform):
        return UniformRouter(total)
    order = torch.Generator().manual_seed(order_seed)
    if isinstance(routing, Zipf):
        return ZipfRouter(total, top_k, routing.exponent, torch.randperm(total, generator=order))
    if isinstance(routing, Hot):
        # On this rank: it is the rank with the hot expert that the others wait for.
        hot = int(torch.randint(shape.local_experts, (), generator=order))
        return HotRouter(total, top_k, routing.share, hot)
    return _trace_router(routing, shape)


def _trace_router(trace: Trace, shape: MoEShape) -> TraceRouter:
    rows = trace.rows()
    reason = rows.why_not(shape)
    if reason is not None:
        raise UsageError(reason)
    weights = None if rows.weights is None else torch.from_numpy(rows.weights)
    return TraceRouter(total_experts(shape), shape.local_experts, torch.from_numpy(rows.ids), weights)


@dataclass(frozen=True, slots=True)
class UniformRouter:
    """Normal logits: every set of K experts is as likely as any other."""

    total: int

    @property
    def rarest_share(self) -> float:
        """The same for all experts."""
        return 1 / self.total

    def logits(self, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        """Return logits [T, E_total]."""
        return torch.randn((tokens, self.total), dtype=dtype, device=generator.device, generator=generator)


@dataclass(frozen=True, slots=True)
class ZipfRouter:
    """Skewed popularity: each token draws K different experts in proportion to ``rank ** -exponent``.

    ``order`` [E_total] is the expert of each rank, the most popular first.
    """

    total: int
    top_k: int
    exponent: float
    order: torch.Tensor

    @property
    def rarest_share(self) -> float:
        """That of the last rank; drawing different experts only evens it out."""
        return float(self._shares()[-1])

    def logits(self, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        """Return logits [T, E_total]."""
        log_shares = torch.empty(self.total)
        log_shares[self.order] = self._shares().log().float()
        log_shares = log_shares.to(generator.device)

        def draw(rows: slice) -> torch.Tensor:
            return _without_replacement(log_shares.expand(rows.stop - rows.start, -1), self.top_k, generator)

        return _in_chunks(tokens, self.total, generator, dtype, draw)

    def _shares(self) -> torch.Tensor:
        shares = torch.arange(1, self.total + 1, dtype=torch.float64) ** -self.exponent
        return shares / shares.sum()


@dataclass(frozen=True, slots=True)
class HotRouter:
    """One expert that a ``share`` of the tokens choose, at any place of their top-k; the rest is uniform."""

    total: int
    top_k: int
    share: float
    hot: int

    @property
    def rarest_share(self) -> float:
        """The smaller of the hot expert's share of the slots and of any other one's."""
        if self.total == self.top_k:
            return 1 / self.total
        other = (self.top_k - self.share) / (self.total - 1)
        return (min(self.share, other) if other else self.share) / self.top_k

    def logits(self, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        """Return logits [T, E_total]; of many tokens exactly the share has the hot expert, of few as luck rounds it."""
        device = generator.device
        luck = float(torch.rand((), device=device, generator=generator))
        has_hot = torch.zeros(tokens, dtype=torch.bool, device=device)
        has_hot[torch.randperm(tokens, device=device, generator=generator)[: int(self.share * tokens + luck)]] = True
        if self.total == self.top_k:
            has_hot[:] = True  # every token takes every expert

        def draw(rows: slice) -> torch.Tensor:
            return self._ids(has_hot[rows], generator)

        return _in_chunks(tokens, self.total, generator, dtype, draw)

    def _ids(self, has_hot: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        count = len(has_hot)
        scores = torch.zeros((count, self.total), device=generator.device)
        scores[:, self.hot] = -torch.inf
        ids = _without_replacement(scores, self.top_k, generator)
        place = torch.randint(self.top_k, (count, 1), device=generator.device, generator=generator)
        takes = has_hot[:, None] & (torch.arange(self.top_k, device=generator.device) == place)
        if self.total == self.top_k:
            return ids  # the hot expert came last: there was no other
        return ids.masked_fill(takes, self.hot)


@dataclass(frozen=True, slots=True, eq=False)
class TraceRouter:
    """Recorded rows, drawn without replacement where there are enough of them.

    ``ids`` [N, K] int32 and ``weights`` [N, K] float32 or None stay on the CPU. A slot that went nowhere (-1) goes to an
    expert of another rank, which costs this rank as little.
    """

    total: int
    local: int
    ids: torch.Tensor
    weights: torch.Tensor | None

    @property
    def rarest_share(self) -> float:
        """That of the expert that was recorded least often."""
        counts = torch.bincount(self.ids[self.ids >= 0].long())
        return float(counts[counts > 0].min() / self.ids.numel())

    def logits(self, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        """Return logits [T, E_total]; recorded weights come out of the router again, renormalised and rounded."""
        device, recorded = generator.device, len(self.ids)
        if tokens <= recorded:
            drawn = torch.randperm(recorded, device=device, generator=generator)[:tokens]
        else:
            drawn = torch.randint(recorded, (tokens,), device=device, generator=generator)
        drawn = drawn.cpu()
        weights = None if self.weights is None else self.weights[drawn].to(device)

        def draw(rows: slice) -> torch.Tensor:
            return self._placed(self.ids[drawn[rows]].long().to(device), generator)

        return _in_chunks(tokens, self.total, generator, dtype, draw, weights)

    def _placed(self, ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Give every slot that went nowhere an expert of another rank that its token has not chosen yet."""
        nowhere = ids < 0
        if not bool(nowhere.any()):
            return ids
        scores = torch.rand((len(ids), self.total), device=ids.device, generator=generator)
        scores[:, : self.local] = -1.0
        chosen = torch.zeros_like(scores).scatter_add_(1, ids.clamp(min=0), (~nowhere).float())
        free = scores.masked_fill(chosen > 0, -1.0).topk(ids.shape[1], dim=1).indices
        return torch.where(nowhere, free.gather(1, (nowhere.cumsum(1) - 1).clamp(min=0)), ids)


def logits_of(
    ids: torch.Tensor,
    total: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return logits [T, total] of which a router picks exactly ``ids``.

    Args:
        ids: [T, K] int64, different within a row.
        total: experts that the router scores.
        generator: of the noise.
        dtype: of the logits; the choice survives rounding to bf16.
        weights: [T, K] shares that the router is to give the ids, in any scale. Without them it picks the ids in order;
            with them the largest weight first, and equal ones by the lower id.
    """
    tokens, top_k = ids.shape
    noise = torch.rand((tokens, top_k), device=ids.device, generator=generator)
    chosen = STEP * torch.arange(top_k, 0, -1, device=ids.device) + JITTER * noise
    if weights is not None:
        tiny = torch.finfo(torch.float32).tiny
        share = weights / weights.max(dim=1, keepdim=True).values.clamp(min=tiny)
        chosen = share.clamp(min=tiny).log().clamp(min=-LOWEST_WEIGHT)
    lowest = chosen.min(dim=1, keepdim=True).values
    below = torch.randn((tokens, total), device=ids.device, generator=generator).abs()
    return (lowest - GAP - below).scatter(1, ids, chosen).to(dtype)


def _without_replacement(log_shares: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw ``count`` different columns per row in proportion to their shares: the top of log shares plus Gumbel noise."""
    waits = torch.empty(log_shares.shape, device=log_shares.device).exponential_(generator=generator)
    return (log_shares - waits.log()).topk(count, dim=1).indices


def _in_chunks(
    tokens: int,
    total: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    draw: Callable[[slice], torch.Tensor],
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return logits [T, total] of the ids that ``draw`` gives for a few rows at a time."""
    chunk = max(CHUNK // total, 1)
    return torch.cat(
        [
            logits_of(draw(rows), total, generator, dtype, None if weights is None else weights[rows])
            for rows in (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))
        ]
    )
