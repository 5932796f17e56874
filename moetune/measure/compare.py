"""Whether an output is right: a match of the runtime, closer for one GEMM, and no single element far off."""

from __future__ import annotations

import torch

from moetune_kernels.match import MAX_ERROR, errors, why_no_match
from moetune_kernels.shape import WeightFormat

LAYER_SHARE = 1.0
# Of the format's limit, which is for a layer that rounds three times. A right GEMM rounds once, to 1.65e-3 in bf16 and
# 2.1e-4 in fp16; one that keeps its sums in 16 bits is at 4.2e-3 and 5.3e-4 after 12 steps (normal rows, on a CPU).
GEMM_SHARE = {WeightFormat.BF16: 0.5, WeightFormat.FP16: 0.2}
# Of the limit, against an element's own size and the typical one of its row: 4 to 8 times what rounding does to any, and
# one wrong element of a row of 14,336 moves that row's error by 0.8% only.
ELEMENT_FACTOR = 10.0
CHUNK = 1 << 28  # elements that are looked at at once: their copies stay under a GiB


def why_gemm_differs(got: torch.Tensor, want: torch.Tensor, weight_format: WeightFormat) -> str | None:
    """Compare one GEMM's rows [R, columns] with its float32 reference; None when they match."""
    return _why_differs(got, want, weight_format, GEMM_SHARE.get(weight_format, LAYER_SHARE))


def why_layer_differs(got: torch.Tensor, want: torch.Tensor, weight_format: WeightFormat) -> str | None:
    """Compare a whole layer's output [T, H] with its float32 reference; None when it matches."""
    return _why_differs(got, want, weight_format, LAYER_SHARE)


def _why_differs(got: torch.Tensor, want: torch.Tensor, weight_format: WeightFormat, share: float) -> str | None:
    if not len(want):
        return None
    limit = ELEMENT_FACTOR * share * MAX_ERROR[weight_format]
    # Everything is queued before the one wait: on small problems waiting would take longer than comparing.
    *found, worst = torch.cat([errors(got, want), worst_element(got, want, limit)[None]]).tolist()
    problem = why_no_match(found, len(want), weight_format, share)
    return problem or (_element_off(got, want, limit) if worst > 0 else None)


def worst_element(got: torch.Tensor, want: torch.Tensor, limit: float) -> torch.Tensor:
    """Return by how much the worst element of [rows, columns] is off beyond what is allowed; negative when none is.

    Allowed is ``limit`` times its own size and the root mean square of its row together.
    """
    starts = range(0, len(want), _step(want))
    return torch.stack([_excess(got, want, limit, start)[0].max() for start in starts]).max()


def _element_off(got: torch.Tensor, want: torch.Tensor, limit: float) -> str:
    step = _step(want)
    for start in range(0, len(want), step):
        of_rows, beyond = _excess(got, want, limit, start)
        worst = int(of_rows.argmax())
        if float(of_rows[worst]) > 0:
            row, column = start + worst, int(beyond[worst].argmax())
            return f"row {row}, column {column} is {float(got[row, column]):.4g}, not {float(want[row, column]):.4g}"
    raise AssertionError("asked for an element that is off, and none is")


def _step(want: torch.Tensor) -> int:
    return max(CHUNK // want.shape[1], 1)


def _excess(got: torch.Tensor, want: torch.Tensor, limit: float, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by how much each row's worst element is over, and what of each element its own size does not allow."""
    end = start + _step(want)
    got, want = got[start:end], want[start:end]
    typical = want.norm(dim=1) / want.shape[1] ** 0.5
    rounded = want.to(got.dtype)  # 16 bits tell 3% apart, in half of the time
    beyond = (got - rounded).abs_().sub_(rounded.abs_(), alpha=limit)
    return beyond.amax(dim=1).float() - limit * typical, beyond
