"""A compile pool whose process still imports is of no use to anyone who gives up before the first kernel."""

from __future__ import annotations

import threading
import time

import pytest

from moetune.errors import RunError
from moetune.measure.compiler import CompilePool
from moetune.measure.kernel_jobs import gemm_job
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=1024, inter=512, local_experts=8, top_k=2)
CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)


def test_a_pool_that_was_never_given_work_is_closed_at_once(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    pool = CompilePool(workers=1, preload=("slow_to_import",))
    started_s = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - started_s < 30.0  # half of the import
    assert pool._process.returncode is not None


def test_a_pool_whose_process_cannot_import_says_why_in_one_line():
    with CompilePool(workers=1, preload=("no_such_module",)) as pool, pytest.raises(RunError) as caught:
        pool._receive()
    assert str(caught.value) == (
        "the compile process ended: ModuleNotFoundError: No module named 'no_such_module'; run `moetune doctor`"
    )


def test_who_has_many_cores_does_not_wait_for_the_imports_to_hand_out_their_work(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    pool = CompilePool(workers=192, preload=("slow_to_import",))
    kernels = [(place, gemm_job(Role.DOWN, CONFIG, SHAPE, TARGETS["sm_90"])) for place in range(3 * 192)]
    submitting = threading.Thread(target=pool.submit, args=(kernels,), daemon=True)
    submitting.start()
    submitting.join(10.0)
    was_free = not submitting.is_alive()
    pool._process.kill()
    pool.close()
    assert was_free
    assert pool.unfinished == len(kernels)
