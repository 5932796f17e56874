"""Which GPU a CUDA device is: its name and UUID, asked of the driver itself, which makes no context and takes no memory."""

from __future__ import annotations

import ctypes
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass

from moetune.measure.gpu_driver import DriverError, call, device_handle, device_name, opened

_UUID_BYTES = 16


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
    with suppress(OSError, AttributeError, DriverError):  # another vendor's GPU, or a driver too old to be asked
        return _ask(index)
    from moetune_kernels.device import device_info

    return Gpu(name=device_info(index).name, index=index, uuid=None)


def _ask(index: int) -> Gpu:
    driver = opened()
    device = device_handle(driver, index)
    name, raw = device_name(driver, device), ctypes.create_string_buffer(_UUID_BYTES)
    # The second version of this function gives a MIG slice its own UUID, the first one that of the whole GPU.
    call(driver.cuDeviceGetUuid_v2, raw, device)
    return Gpu(name=name, index=index, uuid=f"{'MIG' if 'MIG' in name else 'GPU'}-{uuid.UUID(bytes=raw.raw)}")
