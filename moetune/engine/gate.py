"""The entry of a race: which first launches are hopeless."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from moetune.engine.backend import EntryTerms
from moetune.outcome import Failed, FailureKind
from moetune_kernels.config import MoEKernelConfig

SLOW_RATIO = 2.5  # a first launch this many times the best one gets no second


@dataclass
class Gate:
    """The race's entry: its terms, and whose first launch is the fastest."""

    terms: EntryTerms
    holder: MoEKernelConfig | None = None

    def open_again(self) -> None:
        """Forget the pace, because the config that set it computes the wrong thing."""
        self.terms, self.holder = replace(self.terms, best_us=inf), None

    def refuse(self, config: MoEKernelConfig, first_us: float) -> Failed | None:
        """Return a failure when a first launch is hopeless against the best so far."""
        terms = self.terms
        self.terms = terms.after(first_us)
        if first_us < terms.best_us:
            self.holder = config
        if terms.samples_after(first_us):
            return None
        return Failed(
            FailureKind.SLOW,
            f"its first launch took {first_us:.1f} us, over {terms.slow_ratio} times the best so far "
            f"({terms.best_us:.1f} us)",
        )
