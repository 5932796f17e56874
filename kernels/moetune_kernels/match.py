"""When two outputs are the same: one table of limits for tests, tuner and benchmarks, at every size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    return why_no_match(errors(got, want).tolist(), len(got.flatten(0, -2)), weight_format)


def errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return what :func:`why_no_match` judges, on the device, so that a caller waits for it once.

    Returns:
        [5]: rows that are not finite, the first of them, whole-output relative L2 error, largest relative L2 error of a
        row, and that row.
    """
    import torch

    got, want = got.float().flatten(0, -2), want.float().flatten(0, -2)
    difference = (got - want).norm(dim=1)
    finite = difference.isfinite()  # a NaN or an infinity makes the whole row's norm one
    size = want.norm(dim=1)
    rows = difference / size.clamp_min(1e-30)
    rows = rows.where(size > 0, difference)  # a row that should be zero is judged by its size
    worst, worst_row = rows.max(dim=0)
    whole = difference.norm() / size.norm().clamp_min(1e-30)
    return torch.stack([(~finite).sum().double(), finite.int().argmin().double(), whole, worst, worst_row.double()])


def why_no_match(found: Sequence[float], rows: int, weight_format: WeightFormat, share: float = 1.0) -> str | None:
    """Say what is wrong with :func:`errors`, None when it is a match.

    Args:
        found: the errors, on the host.
        rows: how many rows there are.
        weight_format: whose limit counts.
        share: of that limit, what is allowed: less than 1 where less is rounded than in a whole layer.
    """
    bad_rows, first_bad, whole, worst, worst_row = found
    limit = share * MAX_ERROR[weight_format]
    if bad_rows:
        return f"{bad_rows:.0f} of {rows} rows are not finite, the first is row {first_bad:.0f}"
    if not whole <= limit:
        return f"relative L2 error {whole:.3g}, the limit of {weight_format.value} is {limit:g}"
    if not worst <= ROW_FACTOR * limit:
        return f"row {worst_row:.0f} has relative L2 error {worst:.3g}, the limit of a row is {ROW_FACTOR * limit:g}"
    return None
