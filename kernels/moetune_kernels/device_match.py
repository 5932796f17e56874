"""When a table that was measured on one device may serve another."""

from __future__ import annotations

from collections.abc import Mapping

from moetune_kernels.device import DeviceInfo

# Drivers hold back different amounts of the same memory: two H200 hosts reported 150,754,820,096 and 150,109,880,320 B
# (0.4% apart). No two cards of one name and SM count are sold within 2% of each other.
MEMORY_TOLERANCE = 0.02

# Full names, compared whole: nothing else is a relative, however alike the names look.
RELATIVES: Mapping[str, str] = {
    "NVIDIA H200": "NVIDIA H100 80GB HBM3",
    "NVIDIA H100 80GB HBM3": "NVIDIA H200",
}


def is_same_device(measured: DeviceInfo, here: DeviceInfo) -> bool:
    """Say whether a table measured on one device is that of the other: name, SMs, L2, MIG profile and memory."""
    exact = ("name", "sm", "sm_count", "l2_bytes", "mig")
    if any(getattr(measured, field) != getattr(here, field) for field in exact):
        return False
    return abs(measured.memory_bytes - here.memory_bytes) <= MEMORY_TOLERANCE * here.memory_bytes


def is_relative(measured: DeviceInfo, here: DeviceInfo) -> bool:
    """Say whether a table of another model may stand in: a listed pair of whole cards with equal limits."""
    if RELATIVES.get(here.name) != measured.name or measured.mig is not None or here.mig is not None:
        return False
    return all(getattr(measured, field) == getattr(here, field) for field in ("sm", "sm_count", "smem_limit"))
