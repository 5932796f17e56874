"""Compiled kernels whose instructions are still to be counted: the disassembler is started once for several of them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moetune.measure.cubin_notes import Notes, keep
from moetune.measure.sass import InstructionMix, read_mix, read_mixes
from moetune.outcome import Compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A compiled kernel without its instruction mix.

    Args:
        compiled: what is known of it, and all that is said of it where its code cannot be read.
        path: its cubin.
        entry: hash of its entry in Triton's cache.
        macs_per_step: multiply-adds per warp of one ``block_k`` step, to count an unrolled loop right; None: as it is.
    """

    compiled: Compiled
    path: str
    entry: str
    macs_per_step: float | None


@dataclass(frozen=True, slots=True)
class ReadMixes:
    """The job of the compile pool's processes that reads several kernels' instruction mixes."""

    kernels: tuple[Unread, ...]

    def compile(self) -> list[Compiled]:
        """Return the kernels' reports in order, each with its mix where that can be read: it is worth no failed trial."""
        with contextlib.suppress(OSError):
            cubins = [Path(kernel.path).read_bytes() for kernel in self.kernels]
            pairs = zip(self.kernels, cubins, _mixes(cubins), strict=True)
            return [_finished(kernel, cubin, mix) for kernel, cubin, mix in pairs]
        return [kernel.compiled for kernel in self.kernels]


def with_mix(compiled: Compiled, mix: InstructionMix, macs_per_step: float | None) -> Compiled:
    """Return the report with the instruction mix in it."""
    return replace(
        compiled,
        fixed_instructions=mix.fixed,
        loop_instructions=mix.per_step(macs_per_step) if macs_per_step else mix.loop,
        tensor_instruction=mix.tensor,
    )


def _finished(kernel: Unread, cubin: bytes, mix: InstructionMix | None) -> Compiled:
    if mix is None:
        return kernel.compiled
    keep(kernel.entry, cubin, Notes(kernel.compiled.registers, kernel.compiled.spills, mix))
    return with_mix(kernel.compiled, mix, kernel.macs_per_step)


def _mixes(cubins: Sequence[bytes]) -> Sequence[InstructionMix | None]:
    if len(cubins) > 1:
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            return read_mixes(cubins)
    return [_mix(cubin) for cubin in cubins]


def _mix(cubin: bytes) -> InstructionMix | None:
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        return read_mix(cubin)
    return None
