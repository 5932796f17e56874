"""The GPU process of a sweep, started before the tuner loads itself: what it imports takes seconds, and all wait for it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress

from moetune.errors import RunError
from moetune.measure.gpu_device import torch_build
from moetune.measure.gpu_driver import DRIVER
from moetune.measure.gpu_process import GpuProcess

PRELOAD = "moetune.measure.cuda"


@contextmanager
def gpu_process_ahead() -> Generator[GpuProcess | None]:
    """Yield a GPU process that imports meanwhile, where there may be a GPU for it; it ends with the block.

    It touches no GPU before it is told to. Whether there is one, which takes the driver a while to say, is asked by who uses it.
    None too where it cannot be started: whoever then starts one says why.
    """
    process = _started() if may_have_gpu() else None
    if process is None:
        yield None
        return
    with closing(process):
        yield process


def may_have_gpu() -> bool:
    """Whether this machine has what a CUDA sweep needs, as far as files tell: a torch built for CUDA, and a driver."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    try:
        build = torch_build()
        if build is None or build.cuda is None:
            return False
        ctypes.CDLL(DRIVER)
    except (OSError, ValueError, SyntaxError):
        return False
    return True


def _started() -> GpuProcess | None:
    with suppress(RunError):
        return GpuProcess(PRELOAD)
    return None
