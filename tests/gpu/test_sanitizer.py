"""compute-sanitizer finds nothing in our kernels, and does find a planted overrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASE = Path(__file__).with_name("sanitizer_case.py")
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"

pytestmark = [
    pytest.mark.skipif(not Path(SANITIZER).exists(), reason="compute-sanitizer is not installed"),
    pytest.mark.timeout(400),
]


def sanitize(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # under the caching allocator an overrun lands in memory that is ours
    }
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "9", sys.executable, str(CASE), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380, check=False)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_kernels_are_clean(tool):
    done = sanitize(tool)
    assert "every kernel ran" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.returncode == 0, done.stdout[-4000:]


def test_a_planted_overrun_is_found():
    done = sanitize("memcheck", "--plant")
    assert done.returncode == 9, done.stdout[-2000:]
    assert "store_past_the_end_kernel" in done.stdout
