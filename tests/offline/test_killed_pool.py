"""A tuner that is killed leaves no folder of compilers' temporary files behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

POOL = """
import os, signal, sys
from moetune.measure.compiler import CompilePool

pool = CompilePool(workers=1)
print(pool._scratch.name, flush=True)
sys.stdin.readline()
if sys.argv[1] == "close":
    pool.close()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["kill", "close"])
def test_the_folder_of_temporary_files_goes_with_the_pool(tmp_path, how):
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry), TMPDIR=str(tmp_path)
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", POOL, how], env=environment, **pipes) as tuner:
        scratch = tuner.stdout.readline().strip()
        assert scratch.startswith(str(tmp_path))
        assert [str(path) for path in tmp_path.iterdir()] == [scratch]
        tuner.communicate("go on\n", timeout=120)
        assert tuner.returncode == -signal.SIGKILL
    give_up = time.monotonic() + 60.0
    while list(tmp_path.iterdir()) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
