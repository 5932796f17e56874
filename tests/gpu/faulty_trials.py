"""Trials on the real GPU where some candidates launch a harmful kernel instead of their own."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from moetune.measure.cuda import CudaTrials
from moetune.measure.gpu_messages import GpuSettings
from moetune.measure.open_count import OpenCount
from moetune_kernels.kernel_call import KernelCall, launch_all


@triton.jit
def illegal_kernel(out_ptr, offset):
    """Write far past everything that is mapped."""
    tl.store(out_ptr + offset, 1.0)


@triton.jit
def endless_kernel(flag_ptr):
    """Wait for what nobody writes."""
    value = tl.load(flag_ptr, volatile=True)
    while value == 0:
        value = tl.load(flag_ptr, volatile=True)
    tl.store(flag_ptr, value)


def harmful_calls(fault: str, device: Any) -> tuple[KernelCall, ...]:
    """Return the launches of one fault: ``illegal``, ``endless`` or ``memory``."""
    if fault == "memory":
        torch.empty(1 << 45, dtype=torch.uint8, device=device)
    if fault == "illegal":
        out = torch.zeros(1, device=device)
        return (KernelCall(illegal_kernel, (1,), (out, 1 << 42), {}),)
    return (KernelCall(endless_kernel, (1,), (torch.zeros(1, dtype=torch.int32, device=device),), {}),)


@dataclass(frozen=True, kw_only=True)
class FaultySettings(GpuSettings):
    """``faults`` is a file with a pickled ``{(role, config) or plan: fault}``, read whenever a count is opened."""

    faults: Path


class FaultyTrials(CudaTrials):
    """The real trials, but for those candidates."""

    def __init__(self, settings: FaultySettings) -> None:
        super().__init__(settings.shape, settings.device_index, seed=settings.seed)
        self._settings = settings

    def _make_open(self, tokens):
        opened = super()._make_open(tokens)
        if isinstance(opened, OpenCount):
            faults = pickle.loads(self._settings.faults.read_bytes())
            opened.gemm = partial(self._gemm, opened.gemm, faults)
            opened.layer = partial(self._layer, opened.layer, faults)
        return opened

    def _gemm(self, gemm, faults, role, config):
        fault = faults.get((role, config))
        return gemm(role, config) if fault is None else harmful_calls(fault, self._device)

    def _layer(self, layer, faults, plan, *logits):
        fault = faults.get(plan)
        return layer(plan, *logits) if fault is None else lambda: launch_all(harmful_calls(fault, self._device))


def open_faulty(settings: FaultySettings) -> FaultyTrials:
    """Return the trials of ``settings``."""
    return FaultyTrials(settings)
