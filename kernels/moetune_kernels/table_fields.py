"""Bounds checks for the fields of a table; each raises TableError naming the field, the value and what it must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moetune_kernels.errors import TableError, shown

FIGURE_SOURCES = ("counter", "event", "static", "analytical", "composed", "unavailable")
MAX_TEXT = 4000
MAX_NUMBER = 1e18  # far above any FLOP/s, bytes/s or microseconds; keeps hostile integers away from float arithmetic


def exact_fields(what: str, value: Any, names: set[str]) -> None:
    """Refuse anything but an object with exactly these fields."""
    if not isinstance(value, Mapping):
        raise TableError(f"{what} must be an object, got {short(value)}")
    unknown, lacking = sorted(set(value) - names, key=str), sorted(names - set(value))
    if unknown or lacking:
        raise TableError(f"{what} has unknown fields {unknown} and lacks {lacking}")


def number(name: str, value: Any, low: float = 0.0) -> None:
    """Refuse anything but a finite number of at least ``low``; NaN, infinities and booleans are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < MAX_NUMBER:
        raise TableError(f"{name} must be a finite number from {low:g}, got {short(value)}")


def text(name: str, value: Any) -> None:
    """Refuse anything but a text of bounded length."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise TableError(f"{name} must be a text of at most {MAX_TEXT} characters, got {short(value)}")


def pair(name: str, value: Any) -> tuple[int, int]:
    """Return two whole numbers, or refuse."""
    if not isinstance(value, (list, tuple)) or len(value) != 2 or any(type(item) is not int for item in value):
        raise TableError(f"{name} must be two whole numbers, got {short(value)}")
    return value[0], value[1]


def figure(name: str, value: Any) -> None:
    """Refuse anything but ``{value, source[, reason]}``, with a reason where there is no value."""
    exact_fields(
        name, {"reason": None, **value} if isinstance(value, Mapping) else value, {"value", "source", "reason"}
    )
    if value["source"] not in FIGURE_SOURCES:
        raise TableError(f"{name}.source must be one of {', '.join(FIGURE_SOURCES)}, got {short(value['source'])}")
    reason = value.get("reason")
    if reason is not None:
        text(f"{name}.reason", reason)
    if value["source"] != "unavailable":
        number(f"{name}.value", value["value"])
    elif value["value"] is not None or not reason:
        raise TableError(f"{name} is unavailable, so its value must be null and its reason given")


def short(value: Any) -> str:
    """Show a value in an error, however large it is."""
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (dict, list)) else shown(value)


def clip(text: str, limit: int = 400) -> str:
    """Cut a text that may have come from a hostile file."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
