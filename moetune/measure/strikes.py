"""Which candidates ended a GPU process, and which of them are not launched again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from moetune.outcome import Failed
from moetune_kernels.config import Role
from moetune_kernels.plan import LayerPlan

MAX_STRIKES = 2


class Strikes:
    """Counts them. A candidate is a (role, config), a plan, or whatever else names what was asked.

    >>> from moetune.outcome import FailureKind
    >>> strikes = Strikes()
    >>> strikes.add("kernel", Failed(FailureKind.TIMEOUT, "hung"))
    >>> strikes.refusal("kernel")
    >>> strikes.add("kernel", Failed(FailureKind.TIMEOUT, "hung"))
    >>> strikes.refusal("kernel").reason
    'not launched again: it ended its GPU process 2 times, the last time: hung'
    """

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()
        self._last: dict[Hashable, Failed] = {}

    def add(self, candidate: Hashable, failed: Failed, count: int = 1) -> None:
        """Note that ``candidate`` ended its process ``count`` times, the last time as ``failed`` says."""
        self._counts[candidate] += count
        self._last[candidate] = failed

    def refusal(self, candidate: Hashable) -> Failed | None:
        """Return why ``candidate`` is not launched again, None when it may be; a plan is no better than its kernels."""
        for name in (candidate, *_kernels(candidate)):
            if self._counts[name] >= MAX_STRIKES:
                last = self._last[name]
                times = f"it ended its GPU process {self._counts[name]} times, the last time: {last.reason}"
                return Failed(last.kind, f"not launched again: {times}")
        return None


def _kernels(candidate: Hashable) -> tuple[Hashable, ...]:
    return tuple((role, candidate.config(role)) for role in Role) if isinstance(candidate, LayerPlan) else ()
