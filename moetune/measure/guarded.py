"""Output memory of one GEMM, between two bands that nothing may write to, all of it filled with one NaN."""

from __future__ import annotations

import torch

GUARD_ROWS = 256  # the largest block_m: a kernel that ignores where its block ends writes no further
POISON = 0x7FA5  # bits of a NaN in bf16 and in fp16 that no arithmetic makes


class GuardedRows:
    """Rows [rows, columns] in 16 bits inside a larger buffer; they start on a multiple of 512 bytes on a GPU.

    Args:
        size: (rows, columns).
        dtype: bfloat16 or float16.
        device: where.
    """

    def __init__(self, size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        rows, columns = size
        self._bits = torch.empty((rows + 2 * GUARD_ROWS, columns), dtype=torch.int16, device=device)
        self._inside = self._bits[GUARD_ROWS : GUARD_ROWS + rows]
        self.rows = self._inside.view(dtype)
        band = GUARD_ROWS * columns
        self._bands = self._bits.as_strided((2, band), (band + rows * columns, 1))  # both, as they lie
        self.poison()

    def poison(self) -> None:
        """Fill rows and bands with NaN."""
        self._bits.fill_(POISON)

    def copy(self) -> torch.Tensor:
        """Return what rows and bands hold now, for :meth:`hold`."""
        return self._bits.clone()

    def hold(self, copied: torch.Tensor) -> None:
        """Hold again what they held when :meth:`copy` was asked."""
        self._bits.copy_(copied)

    def is_written(self, unused: torch.Tensor) -> torch.Tensor:
        """Return whether :meth:`why_written` has anything to say, on the device: 0 in float32 when it has not."""
        if not len(unused):
            return (self._bands != POISON).sum(dtype=torch.float32)
        return (torch.cat([*self._bands, self._inside[unused].flatten()]) != POISON).sum(dtype=torch.float32)

    def why_written(self, unused: torch.Tensor) -> str | None:
        """Say what was written beside the rows that a kernel owns, None when nothing was.

        Args:
            unused: ids of rows between the bands that must still hold the poison.
        """
        end = GUARD_ROWS + len(self._inside)
        places = {
            "before its first row": self._bits[:GUARD_ROWS],
            "past its last row": self._bits[end:],
            "to rows of slots that are not routed": self._inside[unused],
        }
        written = torch.stack([(bits != POISON).sum() for bits in places.values()]).tolist()
        found = [f"wrote {count} values {place}" for place, count in zip(places, written, strict=True) if count]
        return ", ".join(found) or None
