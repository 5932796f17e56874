"""The one entry: a live page where there is a GPU, the analytical page of a named device elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from moetune.errors import MissingError
from moetune.models.routing import UNIFORM
from moetune.profiling.page import LayerProfile
from moetune.profiling.request import DEFAULT_TARGET, ProfileRequest
from moetune_kernels.device import TARGETS


def profile(request: ProfileRequest, tell: Callable[[str], None] | None = None) -> LayerProfile:
    """Profile one layer.

    Args:
        request: which layer, token counts, plan and device.
        tell: is told what happens, one short line at a time; meant for stderr.

    Returns:
        The page. ``measured`` is False where nothing ran: for a named target, or without a GPU.

    Raises:
        MissingError: the GPU has no room for even one expert, or another than uniform routing was asked without a GPU.
        RunError: a kernel failed.
        UnsupportedDeviceError: no such device index.
    """
    from moetune.profiling.target import analytical_profile

    if request.target is not None:
        name = TARGETS[request.target].name
        return analytical_profile(
            request, request.target, f"--target {request.target}: the page of {name}, nothing ran on it"
        )
    import torch

    if not torch.cuda.is_available():
        if request.routing != UNIFORM:
            raise MissingError("no GPU here, and the page without one assumes uniform routing; leave --routing away")
        name = TARGETS[DEFAULT_TARGET].name
        note = f"no GPU here: the page of {name} instead; --target names another of {', '.join(TARGETS)}"
        return analytical_profile(request, DEFAULT_TARGET, note)
    from moetune.profiling.live import live_profile

    return live_profile(request, tell or _silent)


def _silent(line: str) -> None:
    del line
