"""What keeps this process from reading hardware counters, whichever program reads them, and the lines that change it."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_DRIVER_PARAMS = Path("/proc/driver/nvidia/params")
_STATUS = Path("/proc/self/status")
_CAPABILITIES = (21, 38)  # SYS_ADMIN and PERFMON; the driver takes either

UNLOCK = (
    "run as root: sudo -E env PATH=$PATH python -m moetune profile …",
    "in a container: docker run --cap-add=SYS_ADMIN … (or --privileged)",
    (
        "for all users of the host: echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | "
        "sudo tee /etc/modprobe.d/nvidia-counters.conf && sudo update-initramfs -u && sudo reboot"
    ),
)
FORBIDDEN = "the NVIDIA driver forbids reading counters"
BUSY = "another program holds the counters (DCGM? `dcgmi profile --pause` frees them)"


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why counters cannot be read, in one sentence, and the lines that would change it."""

    reason: str
    fixes: tuple[str, ...] = ()


class CountersRefusedError(Exception):
    """A way of reading counters does not work here, whatever is launched; the message is one sentence."""


def forbidden() -> Blocked | None:
    """Say what keeps this process from reading hardware counters by any means, or None when nothing known does."""
    if sys.platform != "linux":
        return Blocked("hardware counters are read by Nsight Compute or CUPTI, which moetune drives on Linux only")
    if not _has_nvidia_gpu():
        return Blocked("this machine has no NVIDIA GPU that its driver can see", ("moetune doctor",))
    if _admin_only() and not _is_admin():
        return Blocked("the NVIDIA driver lets only administrators read counters (RmProfilingAdminOnly is 1)", UNLOCK)
    return None


def _has_nvidia_gpu() -> bool:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    try:
        return pynvml.nvmlDeviceGetCount() > 0
    except pynvml.NVMLError:
        return False
    finally:
        pynvml.nvmlShutdown()


def _admin_only() -> bool:
    """Whether the driver says so; a container that hides the file is given the benefit of the doubt."""
    return re.search(r"^RmProfilingAdminOnly:\s*1", _text(_DRIVER_PARAMS), re.MULTILINE) is not None


def _is_admin() -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", _text(_STATUS), re.MULTILINE)
    if found is None:
        return os.geteuid() == 0
    held = int(found.group(1), 16)
    return any(held >> bit & 1 for bit in _CAPABILITIES)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
