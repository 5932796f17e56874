"""The versions that a page's numbers belong to."""

from __future__ import annotations

from importlib import metadata

import moetune_kernels


def versions() -> dict[str, str]:
    """Return moetune's, torch's and Triton's versions, without importing the last two."""
    found = {"moetune": moetune_kernels.__version__}
    for name in ("torch", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def live_versions() -> dict[str, str]:
    """Return :func:`versions` with the driver's and ncu's, where they say."""
    from moetune.measure.ncu import ncu_version

    return versions() | {"driver": _driver(), "ncu": ncu_version() or "not found"}


def _driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "unknown"
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return "unknown"
    finally:
        pynvml.nvmlShutdown()
