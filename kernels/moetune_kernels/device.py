"""What the runtime needs to know of a GPU. The only reader of torch's device properties."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from moetune_kernels.errors import TableError, UnsupportedDeviceError, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One GPU, or one MIG slice of it. Sizes in bytes; ``sm`` is 90 for compute capability 9.0, 942 for gfx942.

    ``smem_limit`` is the most shared memory that one block may opt in to.
    """

    name: str
    sm: int
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    smem_limit: int
    mig: str | None = None

    def __post_init__(self) -> None:
        for name in ("sm", "sm_count", "memory_bytes", "l2_bytes", "smem_limit"):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value < 1 << 50:
                raise TableError(f"device.{name} must be a positive whole number, got {shown(value)}")
        if type(self.name) is not str or not 0 < len(self.name) <= 200:
            raise TableError(f"device.name must be a text of 1 to 200 characters, got {shown(self.name)}")
        if self.mig is not None and type(self.mig) is not str:
            raise TableError(f"device.mig must be a text or null, got {shown(self.mig)}")

    @property
    def is_amd(self) -> bool:
        """Whether this is an AMD CDNA GPU (compiled for, never run by us)."""
        return self.sm >= 900

    @property
    def warp_size(self) -> int:
        """Threads of one warp."""
        return 64 if self.is_amd else 32

    @property
    def slug(self) -> str:
        """The device in a folder name: safe, and different for every name. ``NVIDIA H200`` is ``nvidia_h200``."""
        text = self.name if self.mig is None else f"{self.name} MIG {self.mig}"
        return re.sub(r"^\.|[^a-z0-9.+-]", lambda found: _escape(found.group()), text.lower())

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DeviceInfo:
        """Parse what :meth:`to_json` wrote; raises TableError naming the field that is wrong."""
        names = {"name", "sm", "sm_count", "memory_bytes", "l2_bytes", "smem_limit", "mig"}
        if not isinstance(value, Mapping) or set(value) != names:
            raise TableError(f"device must be an object with exactly {sorted(names)}")
        return cls(**value)


def _escape(character: str) -> str:
    return "_" if character == " " else f"%{ord(character):02x}"


@lru_cache(maxsize=64)
def device_info(index: int) -> DeviceInfo:
    """Read the properties of CUDA device ``index`` (relative to CUDA_VISIBLE_DEVICES); cached per process.

    Raises:
        UnsupportedDeviceError: torch sees no such CUDA device.
    """
    import torch

    if not torch.cuda.is_available() or not 0 <= index < torch.cuda.device_count():
        raise UnsupportedDeviceError(
            f"no CUDA device {shown(index)}: torch sees {torch.cuda.device_count()}; run `moetune doctor`"
        )
    found = torch.cuda.get_device_properties(index)
    mig = re.search(r"\bMIG (\S+)", found.name)
    return DeviceInfo(
        name=found.name if mig is None else found.name[: mig.start()].strip(),
        sm=found.major * 10 + found.minor if torch.version.hip is None else 942,
        sm_count=found.multi_processor_count,
        memory_bytes=found.total_memory,
        l2_bytes=found.L2_cache_size,
        smem_limit=getattr(found, "shared_memory_per_block_optin", 65536),
        mig=None if mig is None else mig.group(1),
    )


def current_device() -> DeviceInfo:
    """Return torch's current CUDA device; raises UnsupportedDeviceError where there is none."""
    import torch

    return device_info(torch.cuda.current_device() if torch.cuda.is_available() else 0)


# Devices to compile for without owning one. Sizes from each vendor's data sheet, except sm_90: read on an H200.
TARGETS: Mapping[str, DeviceInfo] = {
    "sm_80": DeviceInfo(
        name="NVIDIA A100-SXM4-80GB",
        sm=80,
        sm_count=108,
        memory_bytes=85_094_825_984,
        l2_bytes=41_943_040,
        smem_limit=166_912,
    ),
    "sm_86": DeviceInfo(
        name="NVIDIA A10", sm=86, sm_count=72, memory_bytes=24_146_608_128, l2_bytes=6_291_456, smem_limit=101_376
    ),
    "sm_89": DeviceInfo(
        name="NVIDIA L40S", sm=89, sm_count=142, memory_bytes=47_810_936_832, l2_bytes=100_663_296, smem_limit=101_376
    ),
    "sm_90": DeviceInfo(
        name="NVIDIA H200", sm=90, sm_count=132, memory_bytes=150_109_880_320, l2_bytes=62_914_560, smem_limit=232_448
    ),
    "sm_100": DeviceInfo(
        name="NVIDIA B200", sm=100, sm_count=148, memory_bytes=191_503_990_784, l2_bytes=132_644_864, smem_limit=232_448
    ),
    "sm_120": DeviceInfo(
        name="NVIDIA GeForce RTX 5090",
        sm=120,
        sm_count=170,
        memory_bytes=34_190_917_632,
        l2_bytes=100_663_296,
        smem_limit=101_376,
    ),
    "gfx942": DeviceInfo(
        name="AMD Instinct MI300X",
        sm=942,
        sm_count=304,
        memory_bytes=206_141_652_992,
        l2_bytes=4_194_304,
        smem_limit=65_536,
    ),
}
