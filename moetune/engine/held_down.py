"""Which token counts a sweep timed while the GPU's clock was held down, told by its events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moetune.engine.events import Event, TrialEnded
from moetune.outcome import Measured, Stage


@dataclass
class HeldDown:
    """Collects the reasons that the GPU gave in the finals, by token count."""

    _counts: dict[str, set[int]] = field(default_factory=dict[str, set[int]])

    def note(self, event: Event) -> None:
        """Take in one event."""
        if not isinstance(event, TrialEnded) or event.trial.stage is not Stage.FINAL:
            return
        outcome = event.trial.outcome
        clocks = outcome.clocks if isinstance(outcome, Measured) else None
        for reason in (clocks.throttle or ()) if clocks is not None else ():
            self._counts.setdefault(reason, set()).add(event.trial.tokens)

    @property
    def counts(self) -> Mapping[str, tuple[int, ...]]:
        """The token counts of each reason."""
        return {reason: tuple(sorted(tokens)) for reason, tokens in self._counts.items()}
