"""Streams of answers that are broken off, paused, or end with their process at a bad moment: who is to blame, and who not."""

from __future__ import annotations

import time

from planted_gpu import Deed

from moetune.measure.gpu_process import GpuProcess
from moetune.outcome import Measured
from moetune_kernels.config import MoEKernelConfig, Role, Structure

SIX = [
    MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=block_n, block_k=block_k)
    for block_n in (32, 64, 128)
    for block_k in (64, 128)
]


def impatient(method, arguments, tokens):
    return 30.0 if method == "start" else 1.5


def test_a_tuner_that_was_stopped_past_the_time_limit_reads_the_answer_that_lies_there(isolated, diary, monkeypatch):
    backend = isolated(Deed(what="wait", method="time_kernel", target=SIX[2]), limits=impatient)
    assert backend.open(64) is None
    real, pauses = GpuProcess._is_dead, []

    def stopped(process):
        if len(diary("time_kernel")) > 2 and not pauses:
            pauses.append(time.sleep(2.0))
        return real(process)

    monkeypatch.setattr(GpuProcess, "_is_dead", stopped)
    assert all(isinstance(outcome, Measured) for outcome in backend.time_kernels(Role.DOWN, SIX, 3))
    assert pauses
    assert len(diary("start")) == 1
