"""Softmax top-k in plain torch."""

from __future__ import annotations

import torch


def route_reference(logits: torch.Tensor, top_k: int, *, renormalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [T, K] float32 and ids [T, K] int32 of logits [T, E].

    A stable sort puts equal logits in order of their id; NaN counts as -inf; a row without a finite logit has weights
    of zero, one with infinities shares its weight among them.
    """
    value = logits.float()
    value = value.where(~value.isnan(), torch.full_like(value, -torch.inf))
    ids = torch.sort(value, dim=1, descending=True, stable=True).indices[:, :top_k]
    top = value.max(dim=1, keepdim=True).values
    share = torch.where(top.isposinf(), value.isposinf().float(), (value - top.nan_to_num(0, 0, 0)).exp())
    weights = share.gather(1, ids)
    total = (weights if renormalize else share).sum(dim=1, keepdim=True)
    return weights / total.where(total > 0, torch.ones_like(total)), ids.to(torch.int32)
