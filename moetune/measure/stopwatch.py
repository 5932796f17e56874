"""Seconds of the host's clock that questions took, however deep they ask each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")


class Stopwatch:
    """Adds up the seconds between entering and leaving; what is entered again inside counts once.

    Args:
        clock: tells the seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._depth, self._entered_s = clock, 0, 0.0
        self.total_s = 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._entered_s = self._clock()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.total_s += self._clock() - self._entered_s


class _Watched(Protocol):
    @property
    def stopwatch(self) -> Stopwatch: ...


Owner = TypeVar("Owner", bound=_Watched)


def question(ask: Callable[Concatenate[Owner, Parameters], Value]) -> Callable[Concatenate[Owner, Parameters], Value]:
    """Make a method count its time on its owner's ``stopwatch``, also where it raises."""

    @wraps(ask)
    def watched(owner: Owner, *args: Parameters.args, **named: Parameters.kwargs) -> Any:
        with owner.stopwatch:
            return ask(owner, *args, **named)

    return watched
