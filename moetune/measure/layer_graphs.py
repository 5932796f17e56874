"""The graphs of one token count's plans: each is captured once, however many heats a plan is in."""

from __future__ import annotations

from collections.abc import Callable, Collection

from moetune.measure.timer import CapturedLayers, Launch, Replay
from moetune_kernels.plan import LayerPlan


class LayerGraphs:
    """Captured layers by plan, for rows and routing that stay the same.

    Args:
        make: opens an empty set of graphs with a memory pool of its own.
    """

    def __init__(self, make: Callable[[], CapturedLayers]) -> None:
        self._make = make
        self._captured: CapturedLayers | None = None
        self._replays: dict[LayerPlan, Replay] = {}

    def only(self, plans: Collection[LayerPlan]) -> None:
        """Free the graphs of all other plans: those that a heat left behind need no memory."""
        left = [plan for plan in self._replays if plan not in plans]
        if len(left) == len(self._replays) or self._captured is None:
            self.close()  # the next capture has a new pool: torch cannot take up one again that has no graph
            return
        for plan in left:
            self._captured.drop(self._replays.pop(plan))

    def replay(self, plan: LayerPlan, run: Launch) -> Replay:
        """Return the replay of a plan, captured from ``run`` where it has none."""
        if plan not in self._replays:
            self._captured = self._captured or self._make()
            self._replays[plan] = self._captured.capture(run)
        return self._replays[plan]

    def close(self) -> None:
        """Free all graphs; safe to call twice."""
        self._replays.clear()
        if self._captured is not None:
            self._captured.close()
        self._captured = None
