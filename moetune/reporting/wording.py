"""Numbers and foreign texts as a reader sees them."""

from __future__ import annotations

import math
from datetime import UTC, datetime

UNKNOWN = "–"
MAX_TEXT = 300  # a hostile table may carry megabytes in one field


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with ``digits`` significant digits, thousands apart, never in exponent form for usual sizes.

    >>> number(14795.83), number(0.1099), number(0.9999), number(None)
    ('14,796', '0.110', '1.00', '–')
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    if not 1e-6 <= abs(value) < 1e12:
        return f"{value:.{digits - 1}e}"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # after rounding: 0.9999 has that of 1.00
    return f"{value:,.{max(digits - 1 - exponent, 0)}f}"


def tick(value: float) -> str:
    """Write a round number for an axis, without trailing zeros.

    >>> tick(0.5), tick(30000.0)
    ('0.5', '30,000')
    """
    text = number(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def micros(value: float | None) -> str:
    """Write a time in microseconds with one decimal under a thousand.

    >>> micros(669.44), micros(14795.8)
    ('669.4', '14,796')
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def ratio(value: float | None) -> str:
    """Write a speedup.

    >>> ratio(1.0479)
    '1.05×'
    """
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.2f}×"


def percent(value: float | None) -> str:
    """Write a share.

    >>> percent(0.966)
    '97 %'
    """
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value * 100:.0f} %"


def counted(count: int, noun: str) -> str:
    """Write a count with its noun.

    >>> counted(1, "token"), counted(4096, "token")
    ('1 token', '4,096 tokens')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def gib(count: int) -> str:
    """Write bytes as GiB or MiB, whichever reads better.

    >>> gib(150_754_820_096), gib(62_914_560)
    ('140.4 GiB', '60 MiB')
    """
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


def kib(count: int | None) -> str:
    """Write bytes of shared memory in KiB."""
    return UNKNOWN if count is None else f"{count / 1024:,.1f}"


def moment(text: str) -> str:
    """Write an ISO time to the minute, in UTC; any other text as it is, cut.

    >>> moment("2026-12-01T10:03:30+01:00"), moment("yesterday")
    ('2026-12-01 09:03 UTC', 'yesterday')
    """
    try:
        when = datetime.fromisoformat(text)
        when = when.astimezone(UTC) if when.tzinfo else when
    except (ValueError, OverflowError):
        return short(text, 40)
    return f"{when:%Y-%m-%d %H:%M} UTC"


def short(text: object, limit: int = MAX_TEXT) -> str:
    """Cut a foreign text to ``limit`` characters, and say that it was cut."""
    whole = str(text)
    return whole if len(whole) <= limit else f"{whole[: limit - 1]}…"


def plain(text: object, limit: int = 60) -> str:
    """Make a foreign text safe to draw: printable Latin only, so that no glyph is missing, and short."""
    kept = "".join(character if character.isprintable() and ord(character) < 0x180 else "?" for character in str(text))
    return short(kept, limit)
