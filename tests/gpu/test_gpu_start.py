"""A sweep's start on a real GPU: the driver and torch describe the same device, and a process that waits does not touch it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from moetune.measure.gpu_device import driver_device, gpu_is_there
from moetune.measure.gpu_messages import GpuSettings
from moetune.measure.gpu_name import gpu_of
from moetune.measure.isolated import open_isolated
from moetune_kernels.device import device_info
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=512, inter=256, local_experts=8, top_k=2)


def opened_gpus(pid):
    """Return the GPU devices that a process has open."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(str(link.readlink()))
        except FileNotFoundError:  # closed meanwhile
            continue
    return [link for link in links if link.startswith("/dev/nvidia")]


def has_imported(pid):
    return "libtorch_cuda" in Path(f"/proc/{pid}/maps").read_text()


def test_the_driver_describes_the_gpu_as_torch_does():
    assert gpu_is_there()
    found = driver_device(0)
    if "MIG" in gpu_of(0).name:
        assert found is None
    else:
        assert found == device_info(0)


def test_a_process_that_waits_has_imported_torch_and_opened_no_gpu():
    backend = open_isolated(GpuSettings(shape=SHAPE), driver_device(0), (1,))
    try:
        pid, deadline = backend._gpu.pid, time.monotonic() + 60.0
        while not has_imported(pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(3.0)  # the rest of the imports
        assert opened_gpus(pid) == []
        backend.begin()
        assert backend.card() is not None
        if Path("/dev/nvidiactl").exists():  # else devices have other names here, and the line above says nothing
            assert opened_gpus(pid)
    finally:
        backend.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
