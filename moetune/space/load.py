"""How a token count loads the experts of one rank, and which tile heights make sense for it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from moetune_kernels.shape import MoEShape

# From this many rows per expert on, the weights of one expert serve several row tiles, and group_m begins to matter.
MANY_ROWS = 128


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """What uniform routing makes of a token count: local experts that get a row, and rows of each of those."""

    touched: float
    rows: float

    @classmethod
    def of(cls, shape: MoEShape, tokens: int) -> ExpertLoad:
        """Return the expected load of ``tokens`` tokens.

        >>> ExpertLoad.of(MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2), 4096).rows
        1024.0
        """
        total = shape.experts or shape.local_experts
        share = shape.top_k / total
        touched = shape.local_experts * (1.0 - (1.0 - share) ** tokens)
        return cls(touched=touched, rows=tokens * share * shape.local_experts / touched)

    def row_tiles(self, block_m: int) -> float:
        """Return the expected number of row tiles over all touched experts; a partly filled tile counts whole."""
        if self.rows <= 1:
            return self.touched
        # Rows vary from expert to expert: on average half a tile is lost once an expert fills more than one.
        per_expert = max(1.0, self.rows / block_m + (0.5 if self.rows > block_m / 2 else 0.0))
        return self.touched * per_expert


def sensible_block_ms(shape: MoEShape, tokens: int) -> tuple[int, ...]:
    """Return the tile heights worth a measurement at ``tokens`` tokens.

    With few rows per expert the layer streams weights, and a 64-row tile costs nothing extra where it brings wgmma;
    with many rows a low tile reads the weights too often.
    """
    rows = ExpertLoad.of(shape, tokens).rows
    if rows <= MANY_ROWS / 4:
        return (16, 32, 64)
    if rows <= MANY_ROWS / 2:
        return (32, 64, 128)
    if rows <= MANY_ROWS:
        return (64, 128)
    return (64, 128, 256)


def rows_per_expert(shape: MoEShape, tokens: int) -> int:
    """Return the mean rows of a touched expert, rounded up."""
    return ceil(ExpertLoad.of(shape, tokens).rows)
