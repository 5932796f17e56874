"""One typed step into parsed JSON, which is Any until it is looked at."""

from __future__ import annotations

from typing import Any, cast


def as_object(value: Any) -> dict[str, Any] | None:
    """Return ``value`` when it is a JSON object, else None."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None
