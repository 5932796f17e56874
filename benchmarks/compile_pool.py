"""How fast the compile pool is: kernels of a real sweep's candidates, from an empty cache and then from a full one, no GPU.

    python3 benchmarks/compile_pool.py --kernels 48 --workers 2

CPU seconds are those of the pool's processes (ptxas and the disassembler included), their start too.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import tempfile
import time

from moetune.measure.compile_job import KernelJob
from moetune.measure.compiler import CompilePool
from moetune.measure.kernel_jobs import PRELOAD, gemm_job
from moetune.measure.offline import Choice
from moetune.outcome import Compiled
from moetune.space import candidates
from moetune_kernels.config import Role
from moetune_kernels.device import TARGETS
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8)  # qwen3-30b-a3b
TOKENS = (1, 16, 64, 1024, 16384)
LIMIT = 135  # candidates per GEMM, as a sweep with --budget 240 in 15 processes


def main() -> int:
    """Compile a random share of the candidates and print the speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=48)
    parser.add_argument("--workers", type=int, default=max(len(os.sched_getaffinity(0)) - 1, 1))
    parser.add_argument("--target", choices=sorted(TARGETS), default="sm_90")
    options = parser.parse_args()
    device = TARGETS[options.target]
    wanted = [(role, config) for role in Role for config in candidates(SHAPE, device, role, TOKENS, LIMIT).configs]
    random.Random(1).shuffle(wanted)  # noqa: S311  # a fixed sample, no secret
    jobs = [(key, gemm_job(*key, SHAPE, device)) for key in wanted[: options.kernels]]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for name in ("empty", "full"):
            sys.stdout.write(
                f"{name} cache, {options.target}, {options.workers} processes: {_compile(jobs, options.workers)}\n"
            )
    return 0


def _compile(jobs: list[tuple[Choice, KernelJob]], workers: int) -> str:
    before_s, started_s = _used_s(), time.monotonic()
    with CompilePool(workers=workers, preload=PRELOAD) as pool:
        found = pool.compile(jobs)
        outcomes = [next(found)[1]]
        first_s = time.monotonic() - started_s
        outcomes += [outcome for _, outcome in found]
        wall_s = time.monotonic() - started_s
    good = sum(isinstance(outcome, Compiled) for outcome in outcomes)
    return (
        f"{len(outcomes)} kernels ({good} compiled), the first after {first_s:.1f} s, all after {wall_s:.1f} s, "
        f"{(_used_s() - before_s) / len(outcomes):.2f} CPU s per kernel"
    )


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
