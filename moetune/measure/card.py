"""The GPU before it is timed: whether somebody else computes on it, and whether it is held down already."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from moetune.measure.clocks import IDLE_BIT, ClockReading, Clocks, OtherProcess
from moetune.outcome import POWER_CAP

BUSY_PERCENT = 10  # a display takes less, a server that waits for requests nothing
LOOKS, PAUSE_S = 3, 0.7  # NVML's share is of up to the last second, which may have been the end of an earlier sweep
MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CardState:
    """One GPU that nothing of this sweep runs on yet; None where NVML does not say."""

    reading: ClockReading
    others: tuple[OtherProcess, ...] | None
    busy_percent: int | None


def card_state(clocks: Clocks, pause: Callable[[float], None] = time.sleep) -> CardState:
    """Return what NVML says of the GPU; a busy one is looked at again, because what was just done may be over."""
    state = _state(clocks)
    for _ in range(LOOKS - 1):
        if not troubles(state):
            break
        pause(PAUSE_S)
        state = _state(clocks)
    return state


def _state(clocks: Clocks) -> CardState:
    return CardState(reading=clocks.read(), others=clocks.others(), busy_percent=clocks.busy_percent())


def troubles(state: CardState) -> list[str]:
    """Return a sentence for each thing that would make times longer than this GPU's: what to expect, and the fix."""
    found: list[str] = []
    if state.others:
        named = ", ".join(map(str, state.others[:MOST_NAMED])) + (", …" if len(state.others) > MOST_NAMED else "")
        found.append(f"this GPU is shared with {named}; stop that, or take another GPU with --device")
    elif (state.busy_percent or 0) >= BUSY_PERCENT:
        found.append(
            f"this GPU is {state.busy_percent}% busy, by a process that does not show here; wait until it is idle, "
            "or take another GPU with --device"
        )
    reasons = [reason for reason in state.reading.throttle if reason != POWER_CAP or not _is_idle(state.reading)]
    if reasons:
        heat = "" if state.reading.temperature_c is None else f" at {state.reading.temperature_c} C"
        found.append(
            f"this GPU is held down before anything runs on it ({', '.join(reasons)}{heat}); let it cool, and see to its "
            "power and fans"
        )
    return found


def why_refused(state: CardState) -> str | None:
    """Say why a strict sweep does not start here, or None when it does: what cannot be seen is not trusted either."""
    found = troubles(state)
    if found:
        return found[0]
    if state.reading.throttle_bits is None:
        return "the driver does not say here whether the GPU is throttled (a slice, a container); run without --strict"
    if state.others is None and state.busy_percent is None:
        return "the driver does not say here who else computes on the GPU (a slice, a container); run without --strict"
    return None


def _is_idle(reading: ClockReading) -> bool:
    return bool((reading.throttle_bits or 0) & IDLE_BIT)
