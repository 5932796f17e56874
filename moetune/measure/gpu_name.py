"""Which GPU a CUDA device is: its name and UUID, asked of the driver itself, which makes no context and takes no memory."""

from __future__ import annotations

import ctypes
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moetune_kernels.errors import UnsupportedDeviceError

DRIVER = "libcuda.so.1"
_NAME_BYTES, _UUID_BYTES = 256, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU or MIG slice. ``uuid`` is None where nobody knows it: then name and index stand for it."""

    name: str
    index: int
    uuid: str | None

    @property
    def key(self) -> str:
        """What its lock file is called, safe for any file system."""
        text = self.uuid or f"{self.name}-{self.index}"
        return re.sub(r"[^A-Za-z0-9.-]", "_", text)[-120:]

    def __str__(self) -> str:
        return f"{self.name} ({self.uuid or f'device {self.index}'})"


def gpu_of(index: int) -> Gpu:
    """Return CUDA device ``index``, counted within CUDA_VISIBLE_DEVICES as torch counts.

    Raises:
        UnsupportedDeviceError: there is no such device.
    """
    with suppress(OSError, AttributeError, _DriverError):  # another vendor's GPU, or a driver too old to be asked
        return _ask(ctypes.CDLL(DRIVER), index)
    from moetune_kernels.device import device_info

    return Gpu(name=device_info(index).name, index=index, uuid=None)


class _DriverError(Exception):
    """The driver answered with an error number."""


def _ask(driver: Any, index: int) -> Gpu:
    _call(driver.cuInit, 0)
    count, device = ctypes.c_int(), ctypes.c_int()
    _call(driver.cuDeviceGetCount, ctypes.byref(count))
    if not 0 <= index < count.value:
        raise UnsupportedDeviceError(f"no CUDA device {index}: the driver sees {count.value}; run `moetune doctor`")
    _call(driver.cuDeviceGet, ctypes.byref(device), index)
    name, raw = ctypes.create_string_buffer(_NAME_BYTES), ctypes.create_string_buffer(_UUID_BYTES)
    _call(driver.cuDeviceGetName, name, _NAME_BYTES, device)
    # The second version of this function gives a MIG slice its own UUID, the first one that of the whole GPU.
    _call(driver.cuDeviceGetUuid_v2, raw, device)
    text = name.value.decode("utf-8", "replace")
    return Gpu(name=text, index=index, uuid=f"{'MIG' if 'MIG' in text else 'GPU'}-{uuid.UUID(bytes=raw.raw)}")


def _call(function: Any, *arguments: Any) -> None:
    error = function(*arguments)
    if error:
        raise _DriverError(f"{function}: CUDA driver error {error}")
