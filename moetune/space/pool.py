"""Guesses for many configs at once, by the same formula as for one. numpy is loaded with the first of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache

from moetune.space.load import ExpertLoad
from moetune.space.prior import Arithmetic, Problem, Tile, Values, time_of
from moetune_kernels.config import BLOCK_SIZES, MoEKernelConfig


class Pool:
    """Configs of one GEMM that are guessed together: the same times, to the last bit, as ``predict`` one by one.

    Args:
        configs: the configs.
        problem: the GEMM.
    """

    def __init__(self, configs: Sequence[MoEKernelConfig], problem: Problem) -> None:
        import numpy as np

        tiles = [Tile.of(config, problem) for config in configs]
        self.configs = tuple(configs)
        self.problem = problem
        self._columns = {item.name: np.array([getattr(tile, item.name) for tile in tiles]) for item in fields(Tile)}

    def where(self, keeps: Callable[[MoEKernelConfig], bool]) -> Pool:
        """Return the pool of those configs that ``keeps`` holds of, in their order."""
        places = [place for place, config in enumerate(self.configs) if keeps(config)]
        found = Pool((), self.problem)
        found.configs = tuple(self.configs[place] for place in places)
        found._columns = {name: column[places] for name, column in self._columns.items()}
        return found

    def times(self, tokens: int) -> list[float]:
        """Return the guessed time of every config at ``tokens`` tokens."""
        import numpy as np

        if not self.configs:
            return []
        load = ExpertLoad.of(self.problem.shape, tokens)
        by_height = {block_m: load.row_tiles(block_m) for block_m in BLOCK_SIZES}
        row_tiles = np.array([by_height[config.block_m] for config in self.configs])
        return time_of(Tile(**self._columns), row_tiles, load, self.problem, _arrays()).tolist()


@cache
def _arrays() -> Arithmetic:
    import numpy as np

    def powers(bases: Values, exponent: float) -> Values:
        """Return Python's own powers: numpy's differ in the last bit on some processors, and that would break ties."""
        return np.array([base**exponent for base in bases.tolist()])

    return Arithmetic(np.maximum, np.minimum, np.ceil, powers)
