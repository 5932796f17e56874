"""The CUDA driver, asked through ctypes: in milliseconds and without torch. It makes no context and takes no GPU memory."""

from __future__ import annotations

import ctypes
from typing import Any

from moetune_kernels.errors import UnsupportedDeviceError

DRIVER = "libcuda.so.1"


class DriverError(Exception):
    """The driver answered with an error number."""


def opened() -> Any:
    """Return the driver's library, ready to be asked.

    Raises:
        OSError: there is no driver.
        DriverError: it finds no GPU, or none that CUDA_VISIBLE_DEVICES leaves.
    """
    driver = ctypes.CDLL(DRIVER)
    call(driver.cuInit, 0)
    return driver


def device_count(driver: Any) -> int:
    """Return how many devices CUDA_VISIBLE_DEVICES leaves."""
    count = ctypes.c_int()
    call(driver.cuDeviceGetCount, ctypes.byref(count))
    return count.value


def device_handle(driver: Any, index: int) -> ctypes.c_int:
    """Return what the driver calls device ``index``, counted within CUDA_VISIBLE_DEVICES as torch counts.

    Raises:
        UnsupportedDeviceError: there is no such device.
    """
    count, device = device_count(driver), ctypes.c_int()
    if not 0 <= index < count:
        raise UnsupportedDeviceError(f"no CUDA device {index}: the driver sees {count}; run `moetune doctor`")
    call(driver.cuDeviceGet, ctypes.byref(device), index)
    return device


def device_name(driver: Any, device: ctypes.c_int) -> str:
    """Return the device's name; a MIG slice's ends in ``MIG`` and its profile."""
    name = ctypes.create_string_buffer(256)
    call(driver.cuDeviceGetName, name, len(name), device)
    return name.value.decode("utf-8", "replace")


def call(function: Any, *arguments: Any) -> None:
    """Call a function of the driver; raises DriverError when it answers with an error number."""
    error = function(*arguments)
    if error:
        raise DriverError(f"{function}: CUDA driver error {error}")
