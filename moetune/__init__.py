"""Tune fused Mixture-of-Experts kernels for the GPU in front of you; production imports ``moetune_kernels`` alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moetune.profiling import profile_moe_kernel

__all__ = ["profile_moe_kernel"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: `moetune --help` must not wait for it.
    if name != "profile_moe_kernel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moetune.profiling import profile_moe_kernel

    return profile_moe_kernel


def __dir__() -> list[str]:
    return __all__
