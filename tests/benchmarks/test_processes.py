"""Processes of a sweep and their memory, from a /proc that was made up and from this machine's own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import COMPILE, GPU, OTHER, TUNER, HostMemory, Process, left_behind, memory, tree

HOLD = "import sys; held = bytearray(b'x' * int(sys.argv[1])); print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def proc(tmp_path):
    """Return a /proc with a tuner, its GPU process, a compile process with a forked child, ptxas, and a stranger."""

    def add(pid, parent, command, kilobytes):
        folder = tmp_path / str(pid)
        folder.mkdir()
        fields = " ".join(["S", str(parent), *["0"] * 17, str(pid * 7), "0"])
        (folder / "stat").write_text(f"{pid} (a ) name) {fields}\n")
        (folder / "cmdline").write_bytes(b"\0".join([*command, b""]))
        (folder / "status").write_text(f"Name:\tx\nVmRSS:\t{kilobytes} kB\n")
        (folder / "smaps_rollup").write_text(f"Rss: {kilobytes} kB\nPss:      {kilobytes // 2} kB\n")

    python = [b"python3", b"-m"]
    add(10, 1, [*python, b"moetune", b"sweep"], 100)
    add(11, 10, [*python, b"moetune.measure.gpu_worker", b"3", b"4"], 3000)
    add(12, 10, [*python, b"moetune.measure.compile_worker"], 400)
    add(13, 12, [*python, b"moetune.measure.compile_worker"], 500)
    add(14, 13, [b"ptxas", b"-o"], 80)
    add(99, 1, [*python, b"moetune.measure.gpu_worker"], 7000)
    (tmp_path / "self").mkdir()
    return tmp_path


def test_a_sweep_s_processes_are_told_by_what_they_do(proc):
    parts = {one.pid: one.part for one in tree(10, proc)}
    assert parts == {10: TUNER, 11: GPU, 12: COMPILE, 13: COMPILE, 14: OTHER}
    assert tree(77, proc) == []


def test_memory_is_summed_by_part_and_shared_pages_count_once(proc):
    found = memory(tree(10, proc), proc)
    kilo = 1024
    assert found[TUNER] == HostMemory(100 * kilo, 50 * kilo)
    assert found[GPU] == HostMemory(3000 * kilo, 1500 * kilo)
    assert found[COMPILE] == HostMemory(900 * kilo, 450 * kilo)


def test_a_kernel_that_tells_no_shares_leaves_resident_memory(proc):
    (proc / "13" / "smaps_rollup").unlink()
    assert memory(tree(10, proc), proc)[COMPILE] == HostMemory(900 * 1024, None)


def test_a_process_that_ended_meanwhile_holds_nothing(proc):
    family = tree(10, proc)
    for name in ("status", "smaps_rollup", "stat", "cmdline"):
        (proc / "11" / name).unlink()
    assert memory(family, proc)[GPU] == HostMemory(0, 0)


def test_a_real_process_shows_what_it_holds_and_when_it_is_gone():
    size = 50 << 20
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        family = tree(process.pid)
        assert [one.part for one in family] == [TUNER]
        assert size < memory(family)[TUNER].rss < 3 * size
        assert left_behind(family, 0.0) == family
    finally:
        process.communicate(b"", timeout=60)
    assert left_behind(family, 0.0) == []


def test_a_later_process_with_the_same_id_is_not_the_one_that_was_left(proc):
    assert left_behind([Process(11, 10, 77, GPU)], 0.0, proc) == [Process(11, 10, 77, GPU)]
    assert left_behind([Process(11, 10, 76, GPU)], 0.0, proc) == []
