"""Whom a real GPU's lock is for."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from moetune.measure.gpu_lock import locked
from moetune.measure.gpu_name import gpu_of


def test_the_driver_and_torch_name_the_same_gpu():
    found = torch.cuda.get_device_properties(0)
    gpu = gpu_of(0)
    assert gpu.name == found.name
    if "MIG" not in found.name:
        assert gpu.uuid == f"GPU-{found.uuid}"


def test_asking_for_the_name_makes_no_context():
    code = (
        "import ctypes; from moetune.measure.gpu_name import gpu_of; gpu_of(0); context = ctypes.c_void_p(); "
        "assert ctypes.CDLL('libcuda.so.1').cuCtxGetCurrent(ctypes.byref(context)) == 0; assert context.value is None"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_second_sweep_on_this_gpu_waits(tmp_path):
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry), XDG_STATE_HOME=str(tmp_path)
    )
    folders = ["--out", str(tmp_path / "tables"), "--store", str(tmp_path / "trials.sqlite")]
    sizes = ["--hidden", "512", "--inter", "256", "--experts", "8", "--tokens", "1", "--budget", "20"]
    command = [sys.executable, "-m", "moetune", "sweep", *sizes, *folders]
    with locked(gpu_of(0), [tmp_path / "moetune" / "locks"], print, print):
        second = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert second.stderr.readline().startswith(f"waiting for {gpu_of(0)}, which is in use by process {os.getpid()}")
        assert not (tmp_path / "trials.sqlite").exists()
    printed, said = second.communicate(timeout=240)
    assert second.returncode == 0, said
    assert printed.splitlines()[-1].startswith("table: ")
