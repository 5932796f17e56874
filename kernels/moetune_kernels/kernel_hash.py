"""Which kernel files a plan runs, and one hash over their bytes: tells whether a table was measured with these kernels."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from moetune_kernels.plan import LayerPlan

_PACKAGE_DIR = Path(__file__).resolve().parent
_MARK = b"triton.jit"  # what tells a kernel file from plain Python


def kernel_files(plans: Iterable[LayerPlan]) -> tuple[Path, ...]:
    """Return the files that hold the kernels of ``plans`` and the device functions that those import, sorted."""
    wanted: set[Path] = set()
    for plan in plans:
        wanted.add(_PACKAGE_DIR / "gate_up" / f"{plan.gate_up.structure.value}.py")
        wanted.add(_PACKAGE_DIR / "down" / f"{plan.down.structure.value}.py")
    if wanted:  # the small kernels are every plan's
        wanted.update(path for op in ("route", "permute", "combine") for path in _op_files(op))
    pending = [path for path in wanted if path.is_file()]
    found: set[Path] = set()
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += _imported_kernels(path)
    return tuple(sorted(found))


def source_sha256(plans: Iterable[LayerPlan]) -> str:
    """Return one hash over the names and raw bytes of the kernel files that ``plans`` use."""
    digest = hashlib.sha256()
    for path in kernel_files(plans):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE_DIR).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _op_files(op: str) -> list[Path]:
    return [path for path in (_PACKAGE_DIR / op).glob("*.py") if _MARK in path.read_bytes()]


@cache
def _imported_kernels(path: Path) -> tuple[Path, ...]:
    """Return the kernel files of this package that one kernel file imports by ``from … import …``."""
    imported: list[Path] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            package, *parts = node.module.split(".")
            if package != _PACKAGE_DIR.name or not parts:
                continue
            target = _PACKAGE_DIR.joinpath(*parts).with_suffix(".py")
            if target.is_file() and _MARK in target.read_bytes():
                imported.append(target)
    return tuple(imported)
