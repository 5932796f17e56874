"""Who compiles for a live backend, and the same lent to the backends of further GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moetune.engine.backend import Kernel
from moetune.outcome import Compiled, Failed
from moetune_kernels.device import DeviceInfo


class Compiles(Protocol):
    """Who compiles, without a GPU."""

    def submit(self, kernels: Iterable[Kernel], device: DeviceInfo) -> None:
        """Queue kernels for ``device``."""
        ...

    def ended(self, wait_s: float = 0.0) -> Sequence[tuple[Kernel, Compiled | Failed]]:
        """Return the kernels that ended since the last call."""
        ...

    def withdraw(self) -> Sequence[Kernel]:
        """Take back the kernels that nobody has begun."""
        ...

    def close(self) -> None:
        """End what it runs."""
        ...


@dataclass(frozen=True, slots=True)
class LentCompiles:
    """Somebody else's: closing it ends nothing. What it compiled is told once, to whichever backend asks first."""

    lender: Compiles

    def submit(self, kernels: Iterable[Kernel], device: DeviceInfo) -> None:
        """Queue kernels for ``device``."""
        self.lender.submit(kernels, device)

    def ended(self, wait_s: float = 0.0) -> Sequence[tuple[Kernel, Compiled | Failed]]:
        """Return the kernels that ended since anybody's last call."""
        return self.lender.ended(wait_s)

    def withdraw(self) -> Sequence[Kernel]:
        """Take back the kernels that nobody has begun."""
        return self.lender.withdraw()

    def close(self) -> None:
        """Leave the lender as it is."""
