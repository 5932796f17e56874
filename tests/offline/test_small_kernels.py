"""Route, permute and combine are compiled by the pool: at no token count does the GPU process of a sweep miss the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moetune.cli.options import SWEEP_TOKENS
from moetune.engine.schedule import order
from moetune_kernels.device import TARGETS
from moetune_kernels.shape import MoEShape

CASE = Path(__file__).with_name("small_case.py")
LADDER = tuple(int(count) for count in SWEEP_TOKENS.split(","))
SHIPPED = {
    "128-experts": {"hidden": 2048, "inter": 768, "local_experts": 128, "top_k": 8},
    "64-large-experts": {"hidden": 4096, "inter": 14336, "local_experts": 64, "top_k": 2},
    "8-large-experts": {"hidden": 4096, "inter": 14336, "local_experts": 8, "top_k": 2},
}
ONE_OF_TWO_RANKS = {"hidden": 2048, "inter": 768, "local_experts": 64, "experts": 128, "top_k": 8}


def answer(side, tokens, *shapes):
    """Ask another process; what two sides hash, they must hash alike without each other's help."""
    asked = [sys.executable, str(CASE), side, json.dumps(tokens), *map(json.dumps, shapes)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_kernel_has_one_hash_whichever_kernel_a_process_uses_first():
    assert answer("hashes", []) == answer("hashes-reversed", [])


@pytest.mark.parametrize(
    "tokens", [order(LADDER), [3], [1, 2, 3, 4, 8, 16, 64, 600, 1024, 16384]], ids=["ladder", "one-count", "odd-counts"]
)
def test_every_small_kernel_of_a_sweep_is_compiled_by_the_pool_and_no_other(tokens):
    shapes = (*SHIPPED.values(), ONE_OF_TWO_RANKS)
    compiled, launched = answer("pool", tokens, *shapes), answer("launched", tokens, *shapes)
    for shape in map(json.dumps, shapes):
        names = {key.split()[0] for key in launched[shape]}
        assert {"route_kernel", "permute_one_launch_kernel", "combine_kernel"} <= names
        assert set(compiled[shape]) == set(launched[shape])


def test_a_sweep_whose_counts_nobody_told_has_all_of_them_compiled():
    shapes = SHIPPED.values()
    compiled, launched = answer("pool", [], *shapes), answer("launched", LADDER, *shapes)
    assert all(set(compiled[shape]) >= set(launched[shape]) for shape in launched)


@pytest.mark.parametrize("shape", SHIPPED.values(), ids=SHIPPED)
def test_a_job_is_a_binary_and_the_first_counts_need_few(shape):
    from moetune.measure.small_kernels import small_jobs

    jobs = small_jobs(MoEShape(**shape), TARGETS["sm_90"], order(LADDER))
    assert len(jobs) <= 35
    turns = [order(LADDER).index(count) for count, _ in jobs]
    assert turns == sorted(turns)
    assert turns.count(0) == 8


def test_the_gpu_process_adds_nothing_to_the_cache_that_the_pool_left(tmp_path, monkeypatch):
    from moetune.measure.kernel_compiles import KernelCompiles

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = {"hidden": 64, "inter": 64, "local_experts": 2, "top_k": 2}
    compiles = KernelCompiles(MoEShape(**shape), tokens=[16])
    compiles.submit([], TARGETS["sm_90"])
    while compiles._pool.unfinished:
        assert compiles.ended(5.0) == []  # of small kernels nothing is told
    compiles.close()
    before = entries(tmp_path)
    assert len(before) >= 5
    assert len(answer("launch", [16], shape)[json.dumps(shape)]) == len(before)
    assert entries(tmp_path) == before


def entries(folder):
    """Kernels in Triton's cache, without the launchers beside them."""
    return {path.parent.name for path in folder.glob("*/*.cubin")}
