"""The pool compiles for a GPU that is not here, and one bad kernel costs one kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import odd_jobs
import pytest
import toy
from triton.backends.nvidia import driver as nvidia_driver

from moetune.errors import RunError
from moetune.measure.compile_job import KernelJob
from moetune.measure.compiler import CompilePool, default_workers
from moetune.outcome import Compiled, Failed, FailureKind
from moetune_kernels.device import TARGETS

H200 = TARGETS["sm_90"]


def job(build, *args, device=H200, **fields):
    return KernelJob(
        build=build, args=args, device=device, smem_ceiling=fields.pop("ceiling", device.smem_limit), **fields
    )


def toy_job(block_m, block_n, block_k, num_warps=4, num_stages=3, **fields):
    return job(toy.toy_calls, block_m, block_n, block_k, {"num_warps": num_warps, "num_stages": num_stages}, **fields)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    cache = tmp_path_factory.mktemp("triton-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        with CompilePool(workers=2, limit_s=60, preload=("toy",)) as pool:
            yield pool


def outcomes(pool, jobs):
    return dict(pool.compile(jobs.items()))


def test_registers_shared_memory_and_the_matrix_instruction_are_read_for_an_absent_h200(pool):
    got = outcomes(
        pool, {"small": toy_job(16, 64, 64, macs_per_step=16 * 64 * 64 / 4), "large": toy_job(128, 128, 64, 8)}
    )
    assert got["large"].smem_bytes == 3 * (128 + 128) * 64 * 2  # wgmma holds all three stages
    assert got["large"].tensor_instruction == "HGMMA"
    assert got["large"].block_size == 256
    assert got["small"].tensor_instruction == "HMMA"
    for compiled in got.values():
        assert 24 <= compiled.registers <= 255
        assert compiled.spills == 0
        assert 20 <= compiled.loop_instructions <= 200
        assert compiled.fixed_instructions > compiled.loop_instructions


def test_one_pool_serves_several_targets(pool):
    got = outcomes(pool, {name: toy_job(64, 64, 64, device=TARGETS[name]) for name in ("sm_80", "sm_120", "gfx942")})
    assert got["sm_80"].tensor_instruction == "HMMA"
    assert got["sm_120"].registers > 0
    assert got["gfx942"].block_size == 256  # four warps of 64
    assert got["gfx942"].registers > 0


def test_spills_are_counted(pool):
    (spilled,) = outcomes(pool, {"big": toy_job(128, 256, 64, 4)}).values()
    assert spilled.spills > 0
    assert spilled.registers == 255


def test_a_kernel_over_its_shared_memory_ceiling_fails_with_both_numbers(pool):
    (failed,) = outcomes(pool, {"over": toy_job(128, 128, 64, 8, ceiling=65_536)}).values()
    assert failed == Failed(FailureKind.RESOURCES, "needs 98,304 B of shared memory, the limit is 65,536 B")


def test_a_crash_costs_one_kernel(pool):
    got = outcomes(pool, {"crash": job(toy.crash), "good": toy_job(16, 64, 64)})
    assert got["crash"] == Failed(FailureKind.COMPILE, "the compiler's process was killed by signal 11")
    assert isinstance(got["good"], Compiled)


def pids(pool, count):
    """Return the process that did each of ``count`` jobs, one job at a time."""
    return [outcomes(pool, {"pid": job(toy.say_pid)})["pid"].reason.rsplit(" ", 1)[1] for _ in range(count)]


@pytest.fixture
def one_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with CompilePool(workers=1, preload=("toy", "odd_jobs")) as pool:
        yield pool


def test_the_launcher_is_built_where_a_driver_is_and_kernels_of_one_signature_share_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    driver = tmp_path / "driver"
    driver.mkdir()
    (tmp_path / "empty.c").write_text("")
    for name in ("libcuda.so.1", "libcuda.so"):
        subprocess.run(["cc", "-shared", "-o", str(driver / name), str(tmp_path / "empty.c")], check=True)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(driver))
    with CompilePool(workers=1, preload=("toy",)) as pool:
        got = outcomes(pool, {"small": toy_job(16, 64, 64), "large": toy_job(64, 64, 64)})
    assert all(isinstance(compiled, Compiled) for compiled in got.values())
    assert len(list((tmp_path / "cache").glob("*/*.cubin"))) == 2
    launchers = len(list((tmp_path / "cache").glob("*/__triton_launcher*.so")))
    assert launchers == hasattr(nvidia_driver, "make_launcher")  # newer Tritons launch all signatures by one function


def test_no_launcher_is_built_where_no_driver_is(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path / "nothing"))
    with CompilePool(workers=1, preload=("toy",)) as pool:
        assert isinstance(outcomes(pool, {"small": toy_job(16, 64, 64)})["small"], Compiled)
    assert not list(tmp_path.glob("*/__triton_launcher*"))


def test_a_process_compiles_one_kernel_after_another_until_it_has_done_its_share(one_worker):
    from moetune.measure.compile_worker import _JOBS_PER_CHILD

    assert Counter(Counter(pids(one_worker, 2 * _JOBS_PER_CHILD)).values()) == {_JOBS_PER_CHILD: 2}


def test_a_process_that_dies_between_kernels_is_replaced(one_worker):
    (first,) = pids(one_worker, 1)
    os.kill(int(first), signal.SIGKILL)
    while Path(f"/proc/{first}").exists():
        time.sleep(0.01)
    (second,) = pids(one_worker, 1)
    assert second != first


def test_a_crash_is_followed_by_a_new_process(one_worker):
    (before,) = pids(one_worker, 1)
    assert outcomes(one_worker, {"crash": job(toy.crash)})["crash"].kind is FailureKind.COMPILE
    (after,) = pids(one_worker, 1)
    assert after != before


def test_an_error_becomes_one_line_and_its_noise_goes_nowhere(pool, capfd):
    (failed,) = outcomes(pool, {"bad": job(toy.noisy_error)}).values()
    assert failed == Failed(FailureKind.COMPILE, "ValueError: ptxas fatal : error in line 2")
    assert capfd.readouterr() == ("", "")


def test_a_kernel_that_ptxas_refuses_is_a_failure_with_the_reason(pool):
    refused = job(toy.toy_calls, 128, 128, 64, {"num_warps": 4, "num_stages": 3, "maxnreg": 24})
    (failed,) = outcomes(pool, {"refused": refused}).values()
    assert isinstance(failed, Failed), failed
    assert failed.kind is FailureKind.COMPILE
    assert "\n" not in failed.reason


def test_a_hang_is_killed_at_the_time_limit_and_does_not_hold_up_the_rest(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with CompilePool(workers=1, limit_s=20, preload=("toy",)) as pool:
        list(pool.compile([("warm", toy_job(16, 64, 64))]))
    with CompilePool(workers=1, limit_s=3, preload=("toy",)) as pool:
        got = outcomes(pool, {"hang": job(toy.hang, str(tmp_path / "started")), "good": toy_job(16, 64, 64)})
    assert got["hang"] == Failed(FailureKind.TIMEOUT, "still compiling after 3 s")
    assert isinstance(got["good"], Compiled)


def test_a_dropped_iterator_does_not_confuse_the_next_one(pool):
    first = pool.compile([("a", toy_job(16, 64, 64)), ("b", toy_job(32, 64, 64))])
    next(first)
    first.close()
    assert set(outcomes(pool, {"c": toy_job(64, 64, 64)})) == {"c"}


def test_two_iterators_in_turn_each_get_their_own_outcomes(pool):
    first = pool.compile([(("first", n), toy_job(16, 64, 64, num_stages=n)) for n in (2, 3, 4)])
    second = pool.compile([(("second", n), toy_job(32, 64, 64, num_stages=n)) for n in (2, 3, 4)])
    keys = [key for pair in zip(first, second, strict=True) for key, _ in pair]
    assert sorted(keys) == [(name, n) for name in ("first", "second") for n in (2, 3, 4)]


def wait_for_all(pool):
    found = {}
    while pool.unfinished:
        found |= dict(pool.ended(wait_s=60.0))
    return found


def test_submitted_kernels_compile_while_the_caller_does_something_else(pool, monkeypatch):
    assert pool.ended() == []
    pool.submit([(n, toy_job(16, 64, 64, num_stages=n)) for n in (2, 3, 4)])
    assert pool.unfinished == 3
    while len(pool._outcomes) < 3:
        pool._take_in()
    waits_s, is_readable = [], pool._is_readable
    monkeypatch.setattr(pool, "_is_readable", lambda wait_s: waits_s.append(wait_s) or is_readable(wait_s))
    found = dict(pool.ended())
    assert set(waits_s) == {0.0}
    assert set(found) == {2, 3, 4}
    assert all(isinstance(outcome, Compiled) for outcome in found.values())
    assert pool.unfinished == 0


def test_what_waits_can_be_withdrawn_and_queued_behind_something_else(one_worker):
    one_worker._window = 1
    jobs = {n: toy_job(16, 64, 64, num_stages=n) for n in (2, 3, 4)}
    one_worker.submit(jobs.items())
    assert one_worker.withdraw() == [3, 4]
    assert one_worker.unfinished == 1
    one_worker.submit([("first", toy_job(32, 64, 64)), (3, jobs[3])])
    assert list(wait_for_all(one_worker)) == [2, "first", 3]


def test_what_was_sent_and_not_begun_can_be_withdrawn_too(one_worker, tmp_path):
    log, go_on = tmp_path / "log", tmp_path / "go-on"
    assert one_worker.withdraw() == []
    assert pids(one_worker, 1)  # from here on it surely answers

    def held(name):
        return name, odd_jobs.Held(str(log), name, str(go_on))

    one_worker.submit([held(name) for name in ("a", "b", "c", "d", "e")])
    while not log.exists():
        time.sleep(0.01)
    assert one_worker.withdraw() == ["b", "c", "d", "e"]
    assert one_worker.unfinished == 1
    one_worker.submit([held("e"), held("b")])
    go_on.touch()
    assert list(wait_for_all(one_worker)) == ["a", "e", "b"]
    assert log.read_text().split() == ["a", "e", "b"]  # each began once, and the wanted one first
    assert one_worker.withdraw() == []


def test_withdrawing_leaves_an_iterator_its_kernels(one_worker):
    iterator = one_worker.compile([(n, job(toy.say_pid)) for n in range(3)])
    first, _ = next(iterator)
    one_worker.submit([("submitted", job(toy.say_pid)), ("second", job(toy.say_pid))])
    one_worker.withdraw()
    assert {first, *(key for key, _ in iterator)} == {0, 1, 2}


def test_a_pool_that_still_imports_does_not_hold_up_who_withdraws(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    pool = CompilePool(workers=1, preload=("slow_to_import",))
    try:
        pool.submit([(n, job(toy.say_pid)) for n in range(5)])
        started_s = time.monotonic()
        assert pool.withdraw() == [3, 4]
        assert time.monotonic() - started_s < 30.0  # half of the import
    finally:
        pool._process.kill()
        pool.close()


def test_a_pool_whose_process_ended_says_so_to_whoever_withdraws(one_worker, tmp_path):
    assert pids(one_worker, 1)
    one_worker.submit([("hang", odd_jobs.Held(str(tmp_path / "log"), "hang", str(tmp_path / "go-on")))])
    while not (tmp_path / "log").exists():  # its child lives on for now
        time.sleep(0.01)
    one_worker._process.kill()
    with pytest.raises(RunError, match="the compile process ended"):
        one_worker.withdraw()
    (tmp_path / "go-on").touch()


def test_submitted_kernels_and_an_iterator_do_not_mix(pool):
    pool.submit([("submitted", toy_job(16, 64, 64))])
    assert set(outcomes(pool, {"iterated": toy_job(32, 64, 64)})) == {"iterated"}
    assert set(wait_for_all(pool)) == {"submitted"}


def test_many_more_kernels_than_pipes_hold_are_fed_as_they_end(one_worker):
    one_worker.submit([(n, job(toy.say_pid)) for n in range(500)])
    found = wait_for_all(one_worker)
    assert set(found) == set(range(500))
    assert {outcome.kind for outcome in found.values()} == {FailureKind.COMPILE}


def test_a_pool_whose_process_ended_says_so_to_whoever_asks_what_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with CompilePool(workers=1, preload=("toy",)) as pool:
        pool.submit([("hang", job(toy.hang, str(tmp_path / "started")))])
        pool._process.kill()
        with pytest.raises(RunError, match="the compile process ended"):
            pool.ended(wait_s=60.0)


def test_closing_ends_a_running_compile_and_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool = CompilePool(workers=1, limit_s=600, preload=("toy",))
    marker = tmp_path / "started"
    pool.submit([("hang", job(toy.hang, str(marker)))])
    while not (marker.exists() and marker.read_text()):
        time.sleep(0.05)
    child = int(marker.read_text())
    pool.close()
    pool.close()  # twice is fine
    marker.unlink()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_the_compiled_kernel_is_the_cache_entry_that_a_launch_looks_up(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with CompilePool(workers=1, preload=("toy",)) as pool:
        list(pool.compile([("toy", toy_job(16, 64, 64))]))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    look_up = (
        "import toy; from moetune.measure.compile_job import pretend_device; from moetune_kernels.device import TARGETS;"
        "pretend_device(TARGETS['sm_90']);"
        "toy.toy_calls(16, 64, 64, {'num_warps': 4, 'num_stages': 3})[0].warmup()"
    )
    path = os.pathsep.join(entry or "." for entry in sys.path)
    subprocess.run([sys.executable, "-c", look_up], check=True, env=os.environ | {"PYTHONPATH": path})
    assert before
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_pool_that_cannot_start_says_what_the_process_said(monkeypatch):
    with CompilePool(workers=1, preload=("no_such_module_anywhere",)) as pool, pytest.raises(RunError) as raised:
        list(pool.compile([("any", toy_job(16, 64, 64))]))
    assert "no_such_module_anywhere" in str(raised.value)


def test_one_core_is_left_to_the_tuner():
    assert default_workers() == max(len(os.sched_getaffinity(0)) - 1, 1)
