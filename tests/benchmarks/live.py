"""`moetune sweep` on a fake GPU that takes its time: what the benchmarks start in place of the real one.

FAKE_FAILS makes it fail, FAKE_FORGETS measures again what the store knows, FAKE_SLOW is the seconds of one timed kernel.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from moetune.engine.budget import Budget  # noqa: E402
from moetune.tuning import Bed, SweepRequest, run_on  # noqa: E402
from tests.engine.conftest import SHAPE, FakeBackend  # noqa: E402
from tests.engine.test_tuning import provenance_of  # noqa: E402

TOKENS = (8, 512)
KERNELS = 5


def main():
    """Sweep; the first one in a Triton cache leaves kernels there."""
    arguments = sys.argv[1:]
    if "FAKE_FAILS" in os.environ:
        sys.exit("a first line\nmoetune: the GPU gives no more answers")
    store, tables = (Path(arguments[arguments.index(name) + 1]) for name in ("--store", "--out"))
    for number in range(KERNELS):
        kernel = Path(os.environ["TRITON_CACHE_DIR"]) / str(number) / "gemm.cubin"
        kernel.parent.mkdir(parents=True, exist_ok=True)
        kernel.touch()
    pause_s = float(os.environ.get("FAKE_SLOW", "0"))
    backend = FakeBackend(time_kernel=lambda role, config: time.sleep(pause_s))
    bed = Bed(backend, provenance_of(backend), "2026-12-01T08:00:00+00:00", tables, store)
    request = SweepRequest(shape=SHAPE, tokens=TOKENS, budget_s=30.0)
    run_on(bed, replace(request, fresh="FAKE_FORGETS" in os.environ), Budget(None), lambda _: None)


if __name__ == "__main__":
    main()
