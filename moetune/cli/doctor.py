"""``moetune doctor``: what this machine can do, and the exact fix of each problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moetune.cli.output import out
from moetune.errors import MissingError

if TYPE_CHECKING:
    from moetune.doctor import Finding

NAME_WIDTH = 14


def doctor() -> None:
    """Look at the GPU, driver, versions, compiler, cache, counters and tables; each problem comes with its fix.

    Example: moetune doctor
    """
    from moetune.doctor import examine, what_works_without_a_gpu

    diagnosis = examine()
    for finding in diagnosis.findings:
        _show(finding)
    if not diagnosis.live:
        out.result("Without a GPU these work:")
        for line in what_works_without_a_gpu(diagnosis.replays):
            out.result(f"  {line}")
    if not diagnosis.can_sweep:
        raise MissingError("no sweep can run here: no GPU that works and no recorded trials; the fixes stand above")
    out.result("A sweep can run here, on the GPU." if diagnosis.live else _replay_verdict(diagnosis.replays))


def _replay_verdict(replays: Sequence[str]) -> str:
    commands = " and ".join(f"`{command}`" for command in replays)
    return f"A sweep of a recorded layer can run here, on its recorded trials: {commands}."


def _show(finding: Finding) -> None:
    out.result(f"{finding.state.value:<8}{finding.name:<{NAME_WIDTH}}{finding.text}")
    for fix in finding.fixes:
        out.result(f"{'':<8}{'fix':<{NAME_WIDTH}}{fix}")
