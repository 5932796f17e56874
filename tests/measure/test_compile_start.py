"""A compile pool whose process still imports is of no use to anyone who gives up before the first kernel."""

from __future__ import annotations

import time

import pytest

from moetune.errors import RunError
from moetune.measure.compiler import CompilePool


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
