"""One kernel to compile, and what Triton needs to do that in a process that has no GPU."""

from __future__ import annotations

import contextlib
import functools
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moetune.measure.cubin_notes import Notes, keep, recall
from moetune.measure.sass import read_amd_resources, read_resources
from moetune.measure.unread import ReadMixes, Unread, with_mix
from moetune.outcome import Compiled, Failed, FailureKind
from moetune_kernels.device import DeviceInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelJob:
    """One kernel to compile for a device that need not be here.

    Args:
        build: a module-level function that returns the kernel's calls on meta tensors; the last one is reported.
        args: what to call it with; must pickle.
        device: what to compile for.
        smem_ceiling: most bytes of shared memory that the kernel may take.
        macs_per_step: multiply-adds per warp of one ``block_k`` step, to count an unrolled loop right; None: as it is.
    """

    build: Callable[..., Sequence[Any]]
    args: tuple[Any, ...]
    device: DeviceInfo
    smem_ceiling: int
    macs_per_step: float | None = None

    def compile(self) -> Compiled | Failed | Unread:
        """Compile here and now, under a stub driver. Only for a process that never launches a kernel.

        Where the instructions are still to be counted, the server of the pool has that done, for several kernels at once.
        """
        return self._glance(self.built()[-1])

    def built(self) -> list[Any]:
        """Compile likewise, launchers included, and return Triton's kernels: nobody asks what they are like."""
        pretend_device(self.device)
        kernels = [call.warmup() for call in self.build(*self.args)]
        if not self.device.is_amd:
            for kernel in kernels:
                build_launcher(kernel)
        return kernels

    def report(self, kernel: Any) -> Compiled | Failed:
        """Read what the compiler says of Triton's compiled ``kernel``, and its instructions."""
        glance = self._glance(kernel)
        return ReadMixes((glance,)).compile()[0] if isinstance(glance, Unread) else glance

    def _glance(self, kernel: Any) -> Compiled | Failed | Unread:
        """Read what takes no disassembler."""
        smem_bytes, threads = kernel.metadata.shared, kernel.metadata.num_warps * self.device.warp_size
        if smem_bytes > self.smem_ceiling:
            reason = f"needs {smem_bytes:,} B of shared memory, the limit is {self.smem_ceiling:,} B"
            return Failed(FailureKind.RESOURCES, reason)
        if self.device.is_amd:
            registers, spills = read_amd_resources(kernel.asm["amdgcn"])
            return Compiled(registers=registers, spills=spills, smem_bytes=smem_bytes, block_size=threads)
        return self._glance_at_cubin(kernel, smem_bytes=smem_bytes, threads=threads)

    def _glance_at_cubin(self, kernel: Any, *, smem_bytes: int, threads: int) -> Compiled | Unread:
        cubin = kernel.asm["cubin"]
        notes = recall(kernel.hash, cubin)
        if notes is None:
            notes = Notes(*read_resources(cubin), None)
            if notes.spills:  # it is dropped before anyone asks for its instructions: all is read
                keep(kernel.hash, cubin, notes)
        compiled = Compiled(registers=notes.registers, spills=notes.spills, smem_bytes=smem_bytes, block_size=threads)
        if notes.mix is not None:
            return with_mix(compiled, notes.mix, self.macs_per_step)
        if notes.spills:
            return compiled
        path = next(path for name, path in kernel.metadata_group.items() if name.endswith(".cubin"))
        return Unread(compiled=compiled, path=str(path), entry=kernel.hash, macs_per_step=self.macs_per_step)


def build_launcher(kernel: Any) -> None:
    """Build the C function that launches ``kernel`` now, into Triton's cache: a third of a second that no trial waits for.

    Triton builds one per signature at the first launch. Where no driver is, nothing will be launched and nothing is built.
    """
    if _can_link_launchers():
        with contextlib.suppress(Exception):  # it is built again, and any error shown, when the kernel is launched
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(kernel.src, kernel.metadata)


@functools.cache
def _can_link_launchers() -> bool:
    try:
        from triton.backends.nvidia.driver import library_dirs

        return bool(library_dirs())
    except (ImportError, AssertionError, OSError, subprocess.SubprocessError):
        return False


class StubDriver:
    """What Triton asks of a driver in order to compile: a target, and a device number of its own."""

    def __init__(self, device: DeviceInfo) -> None:
        from triton.backends.compiler import GPUTarget

        arch = f"gfx{device.sm}" if device.is_amd else device.sm
        self._target = GPUTarget("hip" if device.is_amd else "cuda", arch, device.warp_size)
        self._number = device.sm  # Triton keeps one backend per device number: another target needs another number

    def get_current_target(self) -> Any:
        """Return the target to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """Return the number under which Triton caches this target's kernels in memory."""
        return self._number

    def get_current_stream(self, device: int | None = None) -> int:
        """Return a stream that nothing is ever launched on."""
        del device
        return 0


def pretend_device(device: DeviceInfo) -> None:
    """Make Triton in this process compile for ``device``. It cannot launch anything afterwards."""
    from triton.runtime.driver import driver

    driver.set_active(StubDriver(device))  # pyright: ignore[reportArgumentType]  # Triton asks for three methods only
