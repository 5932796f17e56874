"""The processes of a sweep, started before the tuner loads itself: what they import takes seconds, and all wait for it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.errors import RunError
from moetune.measure.gpu_device import torch_build
from moetune.measure.gpu_driver import DRIVER
from moetune.measure.gpu_process import GpuProcess

if TYPE_CHECKING:
    from moetune.measure.compiler import CompilePool

PRELOAD = "moetune.measure.cuda"


@dataclass(frozen=True, slots=True)
class Ahead:
    """Processes that import already: one for the GPU, and one that compiles. Whoever made them closes them too."""

    gpu: GpuProcess
    pool: CompilePool

    def close(self) -> None:
        """End both; safe to call twice."""
        try:
            self.gpu.close()
        finally:
            self.pool.close()


@contextmanager
def processes_ahead() -> Generator[Ahead | None]:
    """Yield processes that import meanwhile, where there may be a GPU for them; they end with the block.

    They touch no GPU before they are told to. Whether there is one, which takes the driver a while to say, is asked by who
    uses them. None too where they cannot be started: whoever then starts some says why.
    """
    ahead = _started() if may_have_gpu() else None
    if ahead is None:
        yield None
        return
    with closing(ahead):
        yield ahead


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


def _started() -> Ahead | None:
    with suppress(RunError, OSError), ExitStack() as stack:
        gpu = stack.enter_context(closing(GpuProcess(PRELOAD)))
        from moetune.measure.kernel_compiles import compile_pool  # once the other one is on its way

        ahead = Ahead(gpu, compile_pool())
        stack.pop_all()
        return ahead
    return None
