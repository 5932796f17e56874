"""One hash tells whether a table was measured with these kernels."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from moetune_kernels import kernel_hash
from moetune_kernels.config import Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8)
DECODE = heuristic_plan(SHAPE, 1, TARGETS["sm_90"])
PREFILL = heuristic_plan(SHAPE, 16384, TARGETS["sm_90"])


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a copy of the package that a test may edit."""
    copy = tmp_path / "moetune_kernels"
    shutil.copytree(kernel_hash._PACKAGE_DIR, copy)
    monkeypatch.setattr(kernel_hash, "_PACKAGE_DIR", copy)
    return copy


def names(plan) -> set[str]:
    return {str(path.relative_to(kernel_hash._PACKAGE_DIR)) for path in kernel_hash.kernel_files([plan])}


def test_each_structure_counts_its_own_file_and_the_shared_ones():
    assert {"gate_up/gather.py", "down/gather.py", "route/kernel.py", "combine/kernel.py"} <= names(DECODE)
    assert "gate_up/tma.py" not in names(DECODE)
    assert {"gate_up/tma.py", "down/tma.py"} <= names(PREFILL)
    assert all("launch" not in name and "reference" not in name and "__init__" not in name for name in names(PREFILL))


def test_device_functions_that_a_kernel_imports_count():
    assert {"gate_up/epilogue.py", "raster.py"} <= names(DECODE)


def test_one_changed_byte_of_a_used_kernel_changes_the_hash(package):
    before = kernel_hash.source_sha256([DECODE])
    assert kernel_hash.source_sha256([DECODE, DECODE]) == before
    with (package / "gate_up" / "tma.py").open("a") as file:
        file.write("\n")
    assert kernel_hash.source_sha256([DECODE]) == before
    with (package / "raster.py").open("a") as file:
        file.write("\n")
    assert kernel_hash.source_sha256([DECODE]) != before


def test_launchers_and_tile_sizes_are_no_part_of_the_hash(package):
    before = kernel_hash.source_sha256([DECODE])
    with (package / "gate_up" / "launch.py").open("a") as file:
        file.write("\n")
    other = replace(DECODE, gate_up=replace(DECODE.gate_up, block_n=16))
    assert other.gate_up.structure is Structure.GATHER
    assert kernel_hash.source_sha256([other]) == before
