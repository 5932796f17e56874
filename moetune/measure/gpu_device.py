"""What GPU a sweep would tune, found without importing torch: whether there is one, and the sizes that kernels depend on.

The GPU process imports torch and answers for itself seconds later; until then this lets the tuner enumerate and compile.
:class:`moetune.measure.gpu_respawn.RespawningGpu` ends a sweep whose GPU process describes another device.
"""

from __future__ import annotations

import ast
import ctypes
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moetune.measure.gpu_driver import DriverError, call, device_count, device_handle, device_name, opened
from moetune_kernels.device import DeviceInfo
from moetune_kernels.errors import TableError

# cuda.h: CU_DEVICE_ATTRIBUTE_*, the ones behind the fields of torch's device properties that DeviceInfo is read from.
_SM_COUNT = 16
_L2_BYTES = 38
_MAJOR, _MINOR = 75, 76
_SMEM_LIMIT = 97  # shared memory per block, opted in to


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What the installed torch was built for: versions such as ``12.8``, None for a platform that it was not built for."""

    cuda: str | None
    hip: str | None


def gpu_is_there() -> bool:
    """Whether torch can use a GPU here, without importing it wherever the driver and torch's own files can tell.

    False without a driver, a device (``CUDA_VISIBLE_DEVICES`` counts) or torch, with a torch built for CPUs, and with a
    driver of an older major version than the CUDA that torch brings, which torch refuses as well.
    """
    try:
        build = torch_build()
    except (OSError, ValueError, SyntaxError):
        return _torch_sees_one()  # a torch without the file: ask itself
    if build is None:
        return False
    if build.hip is not None:
        return _torch_sees_one()  # no libcuda answers for an AMD GPU
    if build.cuda is None:
        return False
    try:
        driver = opened()
        return device_count(driver) > 0 and _driver_major(driver) >= int(build.cuda.partition(".")[0])
    except (OSError, DriverError):
        return False
    except (AttributeError, ValueError):
        return _torch_sees_one()


def torch_build() -> TorchBuild | None:
    """Return what torch says of itself in its ``version.py``, read and not run; None where torch is not installed.

    Raises:
        OSError: it has no such file.
        ValueError: the file does not say it.
        SyntaxError: the file is no Python.
    """
    spec = find_spec("torch")
    if spec is None:
        return None
    if spec.origin is None:
        raise ValueError("torch has no file")
    said: dict[str, Any] = {}
    for line in ast.parse((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")).body:
        targets = (
            line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
        )
        value = getattr(line, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                said[target.id] = value.value
    found = [said.get(name, "") for name in ("cuda", "hip")]
    if not all(value is None or (type(value) is str and value) for value in found):
        raise ValueError("torch's version.py does not say what it was built for")
    return TorchBuild(*found)


def driver_device(index: int) -> DeviceInfo | None:
    """Return CUDA device ``index`` as the driver describes it; None where only torch can say, as of a MIG slice.

    Raises:
        UnsupportedDeviceError: there is no such device.
    """
    with suppress(OSError, AttributeError, DriverError, TableError):  # TableError: a size that cannot be
        driver = opened()
        device = device_handle(driver, index)
        name, memory_bytes = device_name(driver, device), ctypes.c_size_t()
        call(driver.cuDeviceTotalMem_v2, ctypes.byref(memory_bytes), device)
        if "MIG" not in name:
            return DeviceInfo(
                name=name,
                sm=10 * _attribute(driver, device, _MAJOR) + _attribute(driver, device, _MINOR),
                sm_count=_attribute(driver, device, _SM_COUNT),
                memory_bytes=memory_bytes.value,
                l2_bytes=_attribute(driver, device, _L2_BYTES),
                smem_limit=_attribute(driver, device, _SMEM_LIMIT),
            )
    return None


def device_total() -> int:
    """Return how many CUDA devices CUDA_VISIBLE_DEVICES leaves; 1 where only torch can say."""
    try:
        return device_count(opened())
    except (OSError, AttributeError, DriverError):
        return 1


def _attribute(driver: Any, device: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    call(driver.cuDeviceGetAttribute, ctypes.byref(value), number, device)
    return value.value


def _driver_major(driver: Any) -> int:
    version = ctypes.c_int()
    call(driver.cuDriverGetVersion, ctypes.byref(version))
    return version.value // 1000  # 12080 is CUDA 12.8


def _torch_sees_one() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
