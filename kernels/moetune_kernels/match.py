"""When two outputs are the same: one table of limits for tests, tuner and benchmarks, at every size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moetune_kernels.shape import WeightFormat

if TYPE_CHECKING:
    import torch

# Whole-output relative L2 error against float32. fp16 and bf16 are the rounding of h and y; the others add that of
# the dequantised weights (int4, mxfp4, int8) or of quantised activations (fp8).
MAX_ERROR: Mapping[WeightFormat, float] = {
    WeightFormat.BF16: 6e-3,
    WeightFormat.FP16: 2e-3,
    WeightFormat.FP8: 3e-2,
    WeightFormat.FP8_CHANNEL: 3e-2,
    WeightFormat.FP8_BLOCK: 3e-2,
    WeightFormat.INT8: 1.1e-2,
    WeightFormat.INT4: 1.1e-2,
    WeightFormat.MXFP4: 1.1e-2,
}
ROW_FACTOR = 5.0  # no single row may be over this many times the limit


def match(got: torch.Tensor, want: torch.Tensor, weight_format: WeightFormat) -> str | None:
    """Compare [rows, columns] with its float32 reference; None when it matches, else a sentence with the error."""
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.numel() == 0:
        return None
    got, want = got.float().flatten(0, -2), want.float().flatten(0, -2)
    finite = got.isfinite().all(dim=1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        return f"{int((~finite).sum())} of {got.shape[0]} rows are not finite, the first is row {row}"
    limit = MAX_ERROR[weight_format]
    difference = (got - want).norm(dim=1)
    size = want.norm(dim=1)
    error = float(difference.norm() / size.norm().clamp_min(1e-30))
    if not error <= limit:
        return f"relative L2 error {error:.3g}, the limit of {weight_format.value} is {limit:g}"
    rows = difference / size.clamp_min(1e-30)
    rows = rows.where(size > 0, difference)  # a row that should be zero is judged by its size
    worst = int(rows.argmax())
    if not float(rows[worst]) <= ROW_FACTOR * limit:
        return (
            f"row {worst} has relative L2 error {float(rows[worst]):.3g}, the limit of a row is {ROW_FACTOR * limit:g}"
        )
    return None
