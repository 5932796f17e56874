"""Verdicts that are queued on the device and read together: one wait for many comparisons."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from moetune.outcome import Failed


@dataclass(frozen=True, slots=True)
class Queued:
    """One comparison on its way.

    Args:
        numbers: [n] on the device, what it found.
        judge: says what they mean once they are on the host, and puts back what the launch spoilt.
    """

    numbers: torch.Tensor
    judge: Callable[[Sequence[float]], Failed | None]


def verdicts(queued: Iterable[Queued]) -> list[Failed | None]:
    """Wait once for all numbers and judge every comparison, in order."""
    asked = list(queued)
    if not asked:
        return []
    found = iter(torch.cat([one.numbers for one in asked]).tolist())
    return [one.judge(list(itertools.islice(found, len(one.numbers)))) for one in asked]


def first_wrong(queued: Iterable[Queued]) -> Failed | None:
    """Do the same and return the first failure, None when all are right."""
    return next((wrong for wrong in verdicts(queued) if wrong is not None), None)
