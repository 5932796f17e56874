"""A small kernel, and jobs that go wrong in every way a compile can."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from moetune_kernels.kernel_call import KernelCall


@triton.jit
def toy_matmul_kernel(x_ptr, w_ptr, y_ptr, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        deep = k + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + rows[:, None] * K + deep[None, :])
        w = tl.load(w_ptr + cols[None, :] * K + deep[:, None])
        acc = tl.dot(x, w, acc)
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], acc.to(tl.bfloat16))


def toy_calls(block_m: int, block_n: int, block_k: int, options: dict[str, Any]) -> tuple[KernelCall, ...]:
    x = torch.empty(256, 4096, dtype=torch.bfloat16, device="meta")
    return (KernelCall(toy_matmul_kernel, (1, 1), (x, x, x, 256, 4096, block_m, block_n, block_k), options),)


def hang(marker: str) -> tuple[KernelCall, ...]:
    Path(marker).write_text(str(os.getpid()))
    time.sleep(3600)
    return ()


def crash() -> tuple[KernelCall, ...]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return ()


def noisy_error() -> tuple[KernelCall, ...]:
    os.write(1, b"program text\n" * 10_000)
    os.write(2, b"program text\n" * 10_000)
    raise ValueError("first line says nothing\nptxas fatal : error in line 2\nmore")


def say_pid() -> tuple[KernelCall, ...]:
    raise ValueError(f"error from {os.getpid()}")
