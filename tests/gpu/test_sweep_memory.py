"""A sweep of very many candidates holds no memory of those it is done with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from moetune.engine.backend import compiled_now
from moetune.outcome import Compiled, Failed, Measured
from moetune.space.space import candidates
from moetune_kernels.config import Role
from moetune_kernels.device import device_info
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=1024, inter=512, local_experts=8, top_k=2)
TOKENS = (8, 512)
SETTLED = 20  # candidates after which nothing may grow any more
MAX_HOST_GROWTH = 1 << 20  # bytes per candidate
MAX_GPU_GROWTH = 64 << 20


def host_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.plain_memory
def test_host_and_gpu_memory_stay_flat_over_many_candidates(tmp_path, monkeypatch):
    from moetune.measure.cuda import CudaBackend

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    configs = candidates(SHAPE, device_info(0), Role.GATE_UP, TOKENS, limit=60).configs
    backend = CudaBackend(SHAPE, 0, workers=4)
    timed, host, reserved = 0, 0, 0
    try:
        compiled = [config for config, end in compiled_now(backend, Role.GATE_UP, configs) if isinstance(end, Compiled)]
        for tokens in TOKENS:
            assert backend.open(tokens) is None
            for config in compiled:
                if isinstance(backend.first_launch_us(Role.GATE_UP, config), Failed):
                    continue
                assert isinstance(backend.time_kernel(Role.GATE_UP, config, 3), Measured)
                timed += 1
                if timed == SETTLED:
                    host, reserved = host_bytes(), torch.cuda.memory_reserved()
        assert timed > 2 * SETTLED
        assert host_bytes() - host < MAX_HOST_GROWTH * (timed - SETTLED)
        assert torch.cuda.memory_reserved() - reserved <= MAX_GPU_GROWTH
    finally:
        backend.close()
