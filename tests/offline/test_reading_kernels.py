"""What kernels are made of is read once: for several together, and not again while Triton's cache has them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import odd_jobs
import pytest
import toy
from test_compile_pool import outcomes, toy_job

from moetune.measure import cubin, cubin_notes, sass, unread
from moetune.measure.compile_job import pretend_device
from moetune.measure.compile_messages import Setup
from moetune.measure.compile_worker import Server
from moetune.measure.compiler import CompilePool
from moetune.measure.cubin_notes import Notes
from moetune.measure.sass import InstructionMix
from moetune.measure.unread import ReadMixes, Unread
from moetune.outcome import Compiled
from moetune_kernels.device import TARGETS

TILES = {"small": (16, 64, 64), "middle": (64, 64, 64), "large": (128, 128, 64, 8)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return a cache folder with the toy kernels, as the pool left it, and what it said of them."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        with CompilePool(workers=2, preload=("toy",)) as pool:
            yield folder, outcomes(pool, {name: toy_job(*tile) for name, tile in TILES.items()})


def cubins(folder):
    return [path.read_bytes() for path in sorted(folder.glob("*/*.cubin"))]


def notes_files(folder):
    return sorted(folder.glob("*/moetune-sass.json"))


def again(folder, names=tuple(TILES), workers=2):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        with CompilePool(workers=workers, preload=("toy",)) as pool:
            return outcomes(pool, {name: toy_job(*TILES[name]) for name in names})


def test_one_disassembly_of_several_kernels_reads_what_one_of_each_does(cache):
    folder, _ = cache
    alone = [sass.read_mix(one) for one in cubins(folder)]
    assert len(set(alone)) == len(TILES)
    assert sass.read_mixes(cubins(folder)) == alone
    assert sass.read_mixes(cubins(folder)[::-1]) == alone[::-1]


@pytest.mark.parametrize("bad", [b"", b"\x7fELF\x02\x01", b"not a cubin" * 100])
def test_what_is_no_cubin_is_not_merged(cache, bad):
    folder, _ = cache
    with pytest.raises(ValueError, match="cubin"):
        cubin.merge([*cubins(folder), bad])


def test_a_cubin_that_is_cut_off_is_not_merged(cache):
    folder, _ = cache
    whole = cubins(folder)[0]
    last = range(len(whole) - 600, len(whole))  # the last bytes are the program headers, which nothing else asks for
    for length in (*range(0, len(whole), 997), *last):
        with pytest.raises(ValueError, match="cubin"):
            cubin.merge([whole[:length]])
    assert cubin.merge([whole])


def test_kernels_for_two_architectures_are_not_merged(cache):
    folder, _ = cache
    first, second = cubins(folder)[:2]
    other = bytearray(second)
    other[48] ^= 1  # a byte of the header's flags, which name the architecture
    with pytest.raises(ValueError, match="architecture"):
        cubin.merge([first, bytes(other)])


def test_kernels_that_cannot_be_read_together_are_read_one_by_one(cache, tmp_path, monkeypatch):
    folder, _ = cache
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    paths = sorted(folder.glob("*/*.cubin"))
    broken = tmp_path / "broken.cubin"
    broken.write_bytes(b"no cubin")
    kernels = [Unread(compiled=odd_jobs.BARE, path=str(path), entry="ab" * 32, macs_per_step=None) for path in paths]
    lost = Unread(compiled=odd_jobs.BARE, path=str(broken), entry="cd" * 32, macs_per_step=None)
    good = ReadMixes(tuple(kernels)).compile()
    assert [one.fixed_instructions for one in good] == [sass.read_mix(one).fixed for one in cubins(folder)]
    assert ReadMixes((kernels[0], lost, *kernels[1:])).compile() == [good[0], odd_jobs.BARE, *good[1:]]


def test_the_pool_says_the_same_from_a_full_cache_and_starts_no_disassembler(cache, monkeypatch):
    folder, first = cache
    assert len(notes_files(folder)) == len(TILES)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert again(folder) == first
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(sass, "_run_tool", lambda *_: pytest.fail("a tool was started"))
    pretend_device(TARGETS["sm_90"])
    assert toy_job(*TILES["large"]).compile() == first["large"]


def test_the_gpu_process_reads_a_kernel_itself_where_nobody_has(cache, tmp_path, monkeypatch):
    _, first = cache
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pretend_device(TARGETS["sm_90"])
    toy.toy_matmul_kernel.device_caches.clear()
    job = toy_job(*TILES["small"])
    kernel = job.build(*job.args)[0].warmup()
    assert job.report(kernel) == first["small"]
    assert len(notes_files(tmp_path)) == 1


def _with(**changes):
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _with_mix(**changes):
    return lambda path: _with(mix=json.loads(path.read_text())["mix"] | changes)(path)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


BREAKS = {
    "empty": lambda path: path.write_bytes(b""),
    "cut-off": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "not-text": lambda path: path.write_bytes(b"\xff\xfe" * 30),
    "deep": lambda path: path.write_bytes(b"[" * 1000),
    "long": lambda path: path.write_bytes(path.read_bytes() + b" " * 2000),
    "a-list": lambda path: path.write_text("[]"),
    "another-cubin": _with(cubin="0" * 64),
    "another-reader": _with(reader=sass.READER_VERSION + 1),
    "another-key": _with(more=1),
    "registers-below": _with(registers=-1),
    "registers-above": _with(registers=256),
    "registers-truth": _with(registers=True),
    "spills-text": _with(spills="0"),
    "spills-huge": _with(spills=10**300),
    "mix-list": _with(mix=[1, 2, 3, 4]),
    "loop-fraction": _with_mix(loop=1.5),
    "fixed-huge": _with_mix(fixed=10**300),
    "macs-infinite": _with_mix(loop_macs=float("inf")),
    "macs-nan": _with_mix(loop_macs=float("nan")),
    "tensor-markup": _with_mix(tensor="HGMMA<script>"),
    "tensor-number": _with_mix(tensor=3),
    "pipe": _pipe,
}


@pytest.mark.parametrize("name", BREAKS)
def test_notes_that_are_not_ours_count_as_none(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    notes, entry = Notes(90, 0, InstructionMix(100, 20, 4096.0, "HGMMA")), "12" * 32
    cubin_notes.keep(entry, b"cubin", notes)
    assert cubin_notes.recall(entry, b"cubin") == notes
    assert cubin_notes.recall(entry, b"cubim") is None
    (path,) = notes_files(tmp_path)
    BREAKS[name](path)
    assert cubin_notes.recall(entry, b"cubin") is None
    cubin_notes.keep(entry, b"cubin", notes)
    assert cubin_notes.recall(entry, b"cubin") == notes


@pytest.mark.parametrize(
    "notes",
    [
        Notes(255, 12, None),
        Notes(0, 0, InstructionMix(None, None, None, None)),
        Notes(9, 0, InstructionMix(7, 0, 0, None)),
    ],
)
def test_notes_come_back_as_they_were(tmp_path, monkeypatch, notes):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cubin_notes.keep("12" * 32, b"cubin", notes)
    assert cubin_notes.recall("12" * 32, b"cubin") == notes


def test_a_cache_that_cannot_be_written_costs_no_kernel(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    cubin_notes.keep("12" * 32, b"cubin", Notes(9, 0, None))
    assert cubin_notes.recall("12" * 32, b"cubin") is None


def test_broken_notes_in_the_pool_are_written_anew(cache):
    folder, first = cache
    whole = [path.read_text() for path in notes_files(folder)]
    for path in notes_files(folder):
        path.write_text("{")
    assert again(folder) == first
    assert [path.read_text() for path in notes_files(folder)] == whole


def test_a_kernel_that_cannot_be_read_is_compiled_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    os.mkfifo(tmp_path / "pipe")  # reading it never ends
    jobs = {
        "missing": odd_jobs.Unreadable(str(tmp_path / "missing")),
        "endless": odd_jobs.Unreadable(str(tmp_path / "pipe")),
        "good": toy_job(*TILES["small"]),
    }
    with CompilePool(workers=1, limit_s=10, preload=("toy", "odd_jobs")) as pool:
        got = outcomes(pool, jobs)
    assert got["missing"] == got["endless"] == odd_jobs.BARE
    assert isinstance(got["good"], Compiled)
    assert got["good"].tensor_instruction == "HMMA"


@pytest.mark.parametrize(
    ("waiting", "unread", "reads"), [(5, 3, 0), (5, 4, 4), (5, 6, 4), (0, 1, 1), (0, 3, 3), (0, 6, 4), (2, 0, 0)]
)
def test_kernels_are_read_once_they_are_enough_or_nothing_else_is_to_do(monkeypatch, waiting, unread, reads):
    requests, other = os.pipe()
    try:
        server = Server(requests, other, Setup(workers=4, limit_s=60, preload=()))
        kernel = Unread(compiled=odd_jobs.BARE, path="", entry="", macs_per_step=None)
        server._waiting.extend((number, b"") for number in range(waiting))
        server._unread.extend((100 + number, kernel) for number in range(unread))
        given = []
        monkeypatch.setattr(server, "_give", lambda child, work, job: given.append(work))
        child = type("Idle", (), {"taken": 0})()
        server._give_next(child)
    finally:
        os.close(requests)
        os.close(other)
    if reads:
        assert [[number for number, _ in work] for work in given] == [list(range(100, 100 + reads))]
        assert (len(server._unread), len(server._waiting), child.taken) == (unread - reads, waiting, 0)
    else:
        assert given == [0]
        assert (len(server._unread), len(server._waiting), child.taken) == (unread, waiting - 1, 1)


def test_kernels_that_are_read_together_each_get_their_own_mix(cache, tmp_path, monkeypatch):
    folder, first = cache
    asked = []
    monkeypatch.setattr(unread, "read_mixes", lambda several: asked.append(len(several)) or sass.read_mixes(several))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    paths = sorted(folder.glob("*/*.cubin"))
    kernels = [Unread(compiled=odd_jobs.BARE, path=str(path), entry="ab" * 32, macs_per_step=None) for path in paths]
    found = ReadMixes(tuple(kernels)).compile()
    assert asked == [len(TILES)]
    assert {one.fixed_instructions for one in found} == {one.fixed_instructions for one in first.values()}
