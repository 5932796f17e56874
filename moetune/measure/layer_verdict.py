"""What a whole layer must return for some rows, and the verdict on what one did."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moetune.measure.compare import Reference, is_match, layer_limit, why_layer_differs
from moetune.measure.verdict import Queued
from moetune.outcome import Failed, FailureKind
from moetune_kernels.shape import WeightFormat


class LayerTruth:
    """The float32 output [T, H] of a layer.

    Args:
        want: the output.
        weight_format: whose limit counts.
    """

    def __init__(self, want: torch.Tensor, weight_format: WeightFormat) -> None:
        self._reference, self._format = Reference(want), weight_format

    def look(self, out: torch.Tensor, found_by: str) -> Queued:
        """Queue a look at ``out`` [T, H], which must stay as it is until the verdict was read."""

        def judge(numbers: Sequence[float]) -> Failed | None:
            if is_match(numbers, layer_limit(self._format)):
                return None
            problem = why_layer_differs(out, self._reference.want, self._format)
            return None if problem is None else Failed(FailureKind.WRONG, f"layer: {found_by}: {problem}")

        return Queued(self._reference.numbers(out, layer_limit(self._format)), judge)
