"""How tokens choose experts while a layer is timed: uniformly, by skewed popularity, or as somebody recorded it.

Torch-free values. What makes router logits of them is :mod:`moetune.measure.router`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moetune.errors import UsageError
from moetune.models.trace_file import DIGEST_LETTERS, TRACE_SUFFIX, TraceRows, read_trace
from moetune_kernels.errors import shown
from moetune_kernels.shape import MoEShape

ZIPF_EXPONENT = 1.1
MOST_ZIPF = 8.0  # at 8 the second expert has 0.4% of the first one's slots
LEAST_ZIPF = 0.001
HOT_SHARE = 0.5
FORMS = "uniform, zipf, zipf:1.3, hot, hot:0.5 or a trace such as routing.npz"


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every expert is as likely as any other."""

    @property
    def text(self) -> str:
        """The one spelling that provenance, tables and screens use."""
        return "uniform"

    @property
    def option(self) -> str:
        """What ``--routing`` takes to mean this routing."""
        return self.text


@dataclass(frozen=True, slots=True)
class Zipf:
    """The n-th most popular expert is chosen in proportion to ``n ** -exponent``."""

    exponent: float = ZIPF_EXPONENT

    def __post_init__(self) -> None:
        if not LEAST_ZIPF <= self.exponent <= MOST_ZIPF:  # also refuses NaN
            raise UsageError(f"a Zipf exponent must be from {LEAST_ZIPF} to {MOST_ZIPF:g}, got {self.exponent:g}")

    @property
    def text(self) -> str:
        """The one spelling that provenance, tables and screens use."""
        return f"zipf:{self.exponent!r}"

    @property
    def option(self) -> str:
        """What ``--routing`` takes to mean this routing."""
        return self.text


@dataclass(frozen=True, slots=True)
class Hot:
    """One expert is among the top-k of this ``share`` of the tokens; the other experts are equally likely."""

    share: float = HOT_SHARE

    def __post_init__(self) -> None:
        if not 0.001 <= self.share <= 1.0:
            raise UsageError(f"the hot expert's share of the tokens must be from 0.001 to 1, got {self.share:g}")

    @property
    def text(self) -> str:
        """The one spelling that provenance, tables and screens use."""
        return f"hot:{self.share!r}"

    @property
    def option(self) -> str:
        """What ``--routing`` takes to mean this routing."""
        return self.text


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded ids, drawn row by row. Two files with equal bytes are one routing; where they lie does not count."""

    digest: str
    path: Path = field(compare=False)

    @property
    def text(self) -> str:
        """The one spelling that provenance, tables and screens use."""
        return f"trace:{self.digest}"

    @property
    def option(self) -> str:
        """What ``--routing`` takes to mean this routing."""
        return str(self.path)

    def rows(self) -> TraceRows:
        """Read the recorded rows again.

        Raises:
            UsageError: the file is gone, or its bytes are others than when this value was made.
        """
        rows = read_trace(self.path)
        if rows.digest != self.digest:
            raise UsageError(f"{self.path} changed since it was first read; start again, and leave it alone meanwhile")
        return rows


Routing = Uniform | Zipf | Hot | Trace
UNIFORM = Uniform()


def parse_routing(option: str) -> Routing:
    """Return the routing that a value of ``--routing`` means.

    Raises:
        UsageError: no such routing, a parameter out of range, or a trace that cannot be used.

    >>> parse_routing("zipf:1.30"), parse_routing("hot").text
    (Zipf(exponent=1.3), 'hot:0.5')
    """
    name, colon, parameter = option.partition(":")
    if option == "uniform":
        return UNIFORM
    if name == "zipf":
        return Zipf(_number(option, parameter)) if colon else Zipf()
    if name == "hot":
        return Hot(_number(option, parameter)) if colon else Hot()
    if option.endswith(TRACE_SUFFIX):
        path = Path(option).expanduser().absolute()
        return Trace(read_trace(path).digest, path)
    raise UsageError(f"--routing takes {FORMS}; got {shown(option[:80])}")


def is_routing_text(text: str) -> bool:
    """Whether ``text`` is the one spelling of a routing.

    >>> is_routing_text("zipf:1.1"), is_routing_text("zipf"), is_routing_text("trace:0123456789abcdef")
    (True, False, True)
    """
    if text.startswith("trace:"):
        return re.fullmatch(f"trace:[0-9a-f]{{{DIGEST_LETTERS}}}", text) is not None
    try:
        return not text.endswith(TRACE_SUFFIX) and parse_routing(text).text == text
    except UsageError:
        return False


def routing_to_json(routing: Routing) -> dict[str, str]:
    """Return the routing for another process of this machine."""
    return {"option": routing.option, "text": routing.text}


def routing_from_json(value: Mapping[str, str]) -> Routing:
    """Return what :func:`routing_to_json` wrote; a trace is read, and compared with what it was, when its rows are."""
    kind, _, digest = value["text"].partition(":")
    return Trace(digest, Path(value["option"])) if kind == "trace" else parse_routing(value["option"])


def why_not_of(routing: Routing, shape: MoEShape) -> str | None:
    """Say why a layer cannot be routed so, or None when it can: only a trace depends on the layer."""
    return routing.rows().why_not(shape) if isinstance(routing, Trace) else None


def _number(option: str, parameter: str) -> float:
    # isascii: float() also reads other scripts' digits, and underscores, which nobody means here
    if not parameter.isascii() or len(parameter) > 20 or "_" in parameter:
        raise UsageError(f"--routing takes {FORMS}; got {shown(option[:80])}")
    try:
        return float(parameter)
    except ValueError:
        raise UsageError(f"--routing takes {FORMS}; got {shown(option[:80])}") from None
