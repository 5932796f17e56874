"""Whether an output is right: a match of the runtime, closer for one GEMM, and no single element far off.

:class:`Reference` says it in three numbers that stay on the device, so that many outputs cost one wait; the functions say
in words what is wrong with one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moetune_kernels.match import MAX_ERROR, ROW_FACTOR, errors, why_no_match
from moetune_kernels.shape import WeightFormat

LAYER_SHARE = 1.0
# Of the format's limit, which is for a layer that rounds three times. A right GEMM rounds once, to 1.65e-3 in bf16 and
# 2.1e-4 in fp16; one that keeps its sums in 16 bits is at 4.2e-3 and 5.3e-4 after 12 steps (normal rows, on a CPU).
GEMM_SHARE = {WeightFormat.BF16: 0.5, WeightFormat.FP16: 0.2}
# Of the limit, against an element's own size and the typical one of its row: 4 to 8 times what rounding does to any, and
# one wrong element of a row of 14,336 moves that row's error by 0.8% only.
ELEMENT_FACTOR = 10.0
KEPT = (
    1 << 22
)  # elements of a reference up to which it is kept in 16 bits too: above, comparing takes longer than launching
CHUNK = 1 << 28  # elements that are looked at at once: their copies stay under a GiB


def gemm_limit(weight_format: WeightFormat) -> float:
    """Return the relative error that one GEMM's output may have."""
    return GEMM_SHARE.get(weight_format, LAYER_SHARE) * MAX_ERROR[weight_format]


def layer_limit(weight_format: WeightFormat) -> float:
    """Return the relative error that a whole layer's output may have."""
    return LAYER_SHARE * MAX_ERROR[weight_format]


class Reference:
    """A float32 reference [rows, columns], measured once, that outputs are held against.

    Args:
        want: the reference.
    """

    def __init__(self, want: torch.Tensor) -> None:
        self.want = want
        size = want.norm(dim=1)
        self._divisor = size.where(size > 0, torch.ones_like(size))  # a row that should be zero is judged by its size
        self._whole = size.norm().clamp_min(1e-30)
        self._typical = typical(want)
        self._rounded: tuple[torch.Tensor, torch.Tensor] | None = None

    def numbers(self, got: torch.Tensor, limit: float, *more: torch.Tensor) -> torch.Tensor:
        """Return [3] on the device: what :func:`errors` and :func:`worst_element` find, NaN where ``got`` is not finite.

        Largest relative error of a row, that of the whole, and by how much the worst element is off; then ``more``, single
        numbers in float32, of which each is a launch less here than beside it.
        """
        if not len(self.want):
            return torch.stack([*torch.zeros(3, device=self.want.device), *more])
        difference = torch.sub(got, self.want).norm(dim=1)
        return torch.stack(
            [
                (difference / self._divisor).amax(),
                difference.norm() / self._whole,
                worst_element(got, self.want, ELEMENT_FACTOR * limit, self._typical, self._in_precision_of(got)),
                *more,
            ]
        )

    def _in_precision_of(self, got: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the reference as ``got`` would hold it and its size, kept from look to look where it is small."""
        if self.want.numel() > KEPT:
            return None
        if self._rounded is None or self._rounded[0].dtype != got.dtype:
            rounded = self.want.to(got.dtype, copy=True)
            self._rounded = rounded, rounded.abs()
        return self._rounded


def is_match(numbers: Sequence[float], limit: float) -> bool:
    """Say whether :meth:`Reference.numbers`, on the host, are those of a right output."""
    worst, whole, excess = numbers
    return worst <= ROW_FACTOR * limit and whole <= limit and excess <= 0  # each is false for NaN


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
    *found, worst = torch.cat([errors(got, want), worst_element(got, want, limit, typical(want))[None]]).tolist()
    problem = why_no_match(found, len(want), weight_format, share)
    return problem or (_element_off(got, want, limit) if worst > 0 else None)


def typical(want: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of each row."""
    return want.norm(dim=1) / want.shape[1] ** 0.5


def worst_element(
    got: torch.Tensor,
    want: torch.Tensor,
    limit: float,
    of_rows: torch.Tensor,
    rounded: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return by how much the worst element of [rows, columns] is off beyond what is allowed; not positive when none is.

    Allowed is ``limit`` times its own size and the root mean square of its row together, of which ``of_rows`` [rows] are
    :func:`typical`. ``rounded`` is what ``got``'s precision makes of ``want``, and its size, where somebody has them.
    """
    if rounded is not None:
        return _beyond(got, *rounded, limit).amax(dim=1).sub(of_rows, alpha=limit).amax()
    step = _step(want)
    found = [
        _excess(got[start : start + step], want[start : start + step], limit, of_rows[start : start + step])[0].amax()
        for start in range(0, len(want), step)
    ]
    return found[0] if len(found) == 1 else torch.stack(found).amax()


def _element_off(got: torch.Tensor, want: torch.Tensor, limit: float) -> str:
    step = _step(want)
    for start in range(0, len(want), step):
        part = want[start : start + step]
        of_rows, beyond = _excess(got[start : start + step], part, limit, typical(part))
        worst = int(of_rows.argmax())
        if float(of_rows[worst]) > 0:
            row, column = start + worst, int(beyond[worst].argmax())
            return f"row {row}, column {column} is {float(got[row, column]):.4g}, not {float(want[row, column]):.4g}"
    raise AssertionError("asked for an element that is off, and none is")


def _step(want: torch.Tensor) -> int:
    return max(CHUNK // want.shape[1], 1)


def _excess(
    got: torch.Tensor, want: torch.Tensor, limit: float, of_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by how much each row's worst element is over, and what of each element its own size does not allow."""
    rounded = want.to(got.dtype, copy=True)  # 16 bits tell 3% apart, in half of the time
    beyond = _beyond(got, rounded, rounded.abs(), limit)
    return beyond.amax(dim=1).sub(of_rows, alpha=limit), beyond


def _beyond(got: torch.Tensor, rounded: torch.Tensor, size: torch.Tensor, limit: float) -> torch.Tensor:
    return (got - rounded).abs_().sub_(size, alpha=limit)
