"""The values that each choice of a config may take: the built-in ones, or those that a file names instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from moetune_kernels.config import MoEKernelConfig, Structure

BLOCK_NS = (16, 32, 64, 128, 256)
BLOCK_KS = (32, 64, 128, 256)
WARPS = (2, 4, 8)
STAGES = (2, 3, 4, 5, 6)
GROUP_MS = (1, 4, 8, 16, 32)

# What a config is told apart by. smem_size is no such axis: it is a ceiling on what the compiler reports, and a kernel
# that keeps to two ceilings is one kernel.
NAMES = (
    "structure",
    "block_m",
    "block_n",
    "block_k",
    "num_warps",
    "prefetch_distance",
    "max_registers",
    "group_m",
)
CEILING = "smem_size"


@dataclass(frozen=True, slots=True)
class Axes:
    """Named axes of one GEMM; an axis that is not named is not limited.

    Args:
        values: the values of each named axis, in the order given.
        smem_size: the highest ceiling named, in bytes; None for the device's own.
    """

    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    smem_size: int | None = None

    def holds(self, config: MoEKernelConfig) -> bool:
        """Whether every named axis has the config's value; its shared memory is known only once it is compiled."""
        return all(getattr(config, name) in values for name, values in self.values.items())

    def size(self, others: Mapping[str, tuple[Any, ...]]) -> int:
        """Return how many configs :meth:`configs` makes."""
        return prod(len(self.values.get(name, others[name])) for name in NAMES)

    def choices(self, others: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield every combination in the order of ``NAMES``, the values of axes that are not named from ``others``."""
        yield from product(*(self.values.get(name, others[name]) for name in NAMES))

    def configs(self, others: Mapping[str, tuple[Any, ...]], warp_size: int) -> Iterator[MoEKernelConfig]:
        """Yield every combination as a config."""
        yield from (config_of(choice, warp_size) for choice in self.choices(others))


@lru_cache(maxsize=1 << 15)
def config_of(choice: tuple[Any, ...], warp_size: int) -> MoEKernelConfig:
    """Return the config of one combination in the order of ``NAMES``.

    It is one object as long as it is remembered: both GEMMs have nearly the same configs, and each is hashed once.
    """
    return MoEKernelConfig(**dict(zip(NAMES, choice, strict=True)), warp_size=warp_size)


def built_in(block_ms: tuple[int, ...], structures: tuple[Structure, ...]) -> dict[str, tuple[Any, ...]]:
    """Return the built-in values of every axis; register caps and ``group_m`` are added to a config by its tile."""
    return {
        "structure": structures,
        "block_m": block_ms,
        "block_n": BLOCK_NS,
        "block_k": BLOCK_KS,
        "num_warps": WARPS,
        "prefetch_distance": STAGES,
        "max_registers": (None,),
        "group_m": (1,),
    }
