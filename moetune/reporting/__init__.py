"""Tables and trials in, PNG plots and one self-contained HTML page out.

``build_report`` loads on first use: matplotlib takes most of a second, and the command line imports this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moetune.reporting.build import ReportResult, build_report

__all__ = ["ReportResult", "build_report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moetune.reporting import build

    return getattr(build, name)


def __dir__() -> list[str]:
    return __all__
