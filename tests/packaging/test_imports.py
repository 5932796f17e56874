"""What loads what, seen in fresh processes: production pays for the runtime only, and help is instant."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUNER_ONLY = ("moetune", "typer", "rich", "pandas", "matplotlib")  # torch itself loads jinja2 and pynvml
TORCH_FREE = [
    *(f"moetune_kernels.{name}" for name in ("errors", "shape", "config", "plan", "device")),
    *(f"moetune_kernels.{name}" for name in ("table", "lookup", "heuristic", "paths", "kernel_hash")),
    *(f"moetune.{name}" for name in ("outcome", "errors", "space", "strategies", "engine", "store", "models")),
    *("moetune", "moetune.models.resolve", "moetune.measure.replay", "moetune.tables.check", "moetune.cli.main"),
]


def run(code: str) -> str:
    """Run Python code in a fresh process with both packages importable, and return what it printed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT / "docs", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded_by(code: str, names: tuple[str, ...]) -> list[str]:
    """Return which of ``names`` are loaded once ``code`` has run in a fresh process."""
    return run(f"import sys\n{code}\nprint(*(name for name in {names!r} if name in sys.modules))").split()


@pytest.mark.parametrize("module", TORCH_FREE)
def test_a_torch_free_module_loads_neither_torch_nor_triton(module):
    assert loaded_by(f"import {module}", ("torch", "triton")) == []


def test_reading_a_config_from_the_runtime_loads_no_torch():
    assert loaded_by("from moetune_kernels import LayerPlan, MoEKernelConfig, MoEShape", ("torch", "triton")) == []


def test_looking_up_a_plan_loads_no_torch():
    code = (
        "from moetune_kernels import MoEShape, best_plan\n"
        "from moetune_kernels.device import TARGETS\n"
        "best_plan(MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8), 16, TARGETS['sm_90'])"
    )
    assert loaded_by(code, ("torch", "triton")) == []


def test_the_whole_runtime_loads_nothing_of_the_tuner():
    code = "import moetune_kernels\nfor name in moetune_kernels.__all__: getattr(moetune_kernels, name)"
    assert loaded_by(code, (*TUNER_ONLY, "torch")) == ["torch"]


def test_every_public_name_of_the_runtime_exists():
    code = (
        "import moetune_kernels as m\nprint([name for name in m.__all__ if not hasattr(m, name)], dir(m) == m.__all__)"
    )
    assert run(code) == "[] True"


@pytest.mark.parametrize("first", ["import moetune_kernels.fused_moe.layer", "from moetune_kernels import fused_moe"])
def test_a_function_is_not_hidden_by_the_folder_of_its_name(first):
    """Python binds an imported submodule to its parent, which would turn the function into a module."""
    code = f"{first}\nimport moetune_kernels as m\nprint(*[type(x).__name__ for x in 2 * (m.fused_moe, m.route, m.permute)])"
    assert run(code).split() == ["function"] * 6


def test_help_starts_fast_and_without_torch():
    """Against a bare interpreter on the same machine, so that a slow machine is no failure: 0.05 s against 0.4 s here."""

    def fastest(code: str) -> float:
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            run(code)
            times.append(time.perf_counter() - begin)
        return min(times)

    help_page = "import sys\nsys.argv = ['moetune', '--help']\nfrom moetune.cli.main import main\ntry: main()\nexcept SystemExit: pass"
    assert loaded_by(help_page, ("torch", "triton", "pandas", "matplotlib"))[-1:] != ["torch"]
    assert fastest(help_page) < 25 * fastest("pass") + 0.2
