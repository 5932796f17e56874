"""Where kernels may launch, and what must hold while they do: the tensor's own device, also inside a CUDA graph."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from moetune_kernels.errors import ShapeError, UnsupportedDeviceError, shown

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextmanager
def launching_on(tensor: torch.Tensor) -> Iterator[None]:
    """Make the tensor's device current, because Triton launches on the current one.

    A kernel that was never launched before is loaded at its first launch, which the driver forbids to a thread that
    captures a CUDA graph; inside a capture the thread's mode is relaxed meanwhile, so that any token count can be captured.
    """
    if not tensor.is_cuda:
        yield
        return
    with torch.cuda.device(tensor.device):
        if torch.cuda.is_current_stream_capturing():
            with _relaxed_capture():
                yield
        else:
            yield


@contextmanager
def _relaxed_capture() -> Iterator[None]:
    exchange = _exchange_capture_mode()
    mode = ctypes.c_int(_RELAXED)  # the call swaps it with the thread's own
    if exchange is None or exchange(ctypes.byref(mode)) != 0:
        yield
        return
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def _exchange_capture_mode() -> Callable[[Any], int] | None:
    """Return the driver's cuThreadExchangeStreamCaptureMode, which torch does not expose; None without NVIDIA's driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


def check_tensor(value: object, name: str) -> None:
    """Raise ShapeError for what is no dense tensor."""
    if not isinstance(value, torch.Tensor):
        raise ShapeError(f"{name} must be a torch.Tensor, got {shown(value)}")
    if value.layout is not torch.strided:
        raise ShapeError(f"{name} must be a dense tensor, got {value.layout}; call .to_dense()")


def check_device(tensor: torch.Tensor, name: str) -> None:
    """Raise UnsupportedDeviceError where kernels cannot launch: CPU tensors need Triton's interpreter."""
    if tensor.is_cuda or (tensor.device.type == "cpu" and _interpreted()):
        return
    raise UnsupportedDeviceError(
        f"{name} is on {tensor.device}, the kernels need a CUDA GPU; move it with .cuda(), "
        "or start the process with TRITON_INTERPRET=1 to run them slowly on the CPU"
    )


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
