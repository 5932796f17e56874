"""The GPU process imports as soon as there is a sweep, uses the GPU when it is told, and is waited for when it must answer."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time

import planted_gpu
import pytest
from planted_gpu import DEVICE, TARGETS, Deed

from moetune.errors import RunError
from moetune.measure import ahead as ahead_module
from moetune.measure import gpu_process, gpu_worker, kernel_compiles
from moetune.measure import isolated as gpu_isolated
from moetune.measure.gpu_device import TorchBuild
from moetune.measure.gpu_messages import GpuSettings
from moetune.outcome import Failed, Measured

FACTORY = "import_witness:open_planted"


@pytest.fixture
def imports(tmp_path, monkeypatch):
    """Return a function that waits until so many processes imported the module of the trials, and returns their ids."""
    witness = tmp_path / "imports"
    monkeypatch.setenv("IMPORT_WITNESS", str(witness))

    def imports(count):
        planted_gpu.until(lambda: witness.exists() and len(witness.read_text().split()) >= count)
        return [int(pid) for pid in witness.read_text().split()]

    return imports


def gone(pid):
    return not planted_gpu.is_alive(pid)


def test_it_imports_at_once_and_loads_nothing_before_it_is_told(isolated, diary, imports):
    backend = isolated(factory=FACTORY)
    assert imports(1) == [backend._gpu.pid]
    time.sleep(0.3)
    assert diary() == []
    backend.begin()
    planted_gpu.until(lambda: diary("start"))  # and nobody asked it anything
    assert isinstance(backend.time_combine(), Measured)
    assert len(imports(1)) == 1
    assert len(diary("start")) == 1


def test_a_question_begins_too(isolated, diary):
    backend = isolated()
    assert backend.open(64) is None
    backend.begin()
    assert len(diary("start")) == 1


def test_one_that_was_never_told_to_begin_is_not_left_behind(isolated, diary, imports):
    backend = isolated(factory=FACTORY)
    (pid,) = imports(1)
    backend.close()
    assert gone(pid)
    assert diary() == []


def test_what_the_driver_says_of_the_device_needs_no_process(isolated, diary):
    backend = isolated(device=DEVICE)
    planted_gpu.stop(backend)
    backend.begin()
    started_s = time.monotonic()
    assert backend.device == DEVICE
    assert time.monotonic() - started_s < 20.0  # a stopped process would never answer
    os.kill(backend._gpu.pid, signal.SIGCONT)
    assert isinstance(backend.time_combine(), Measured)
    assert len(diary("start")) == 1


def test_without_it_the_process_is_waited_for(isolated, diary):
    assert isolated().device == DEVICE
    assert len(diary("start")) == 1


def test_a_process_that_describes_another_device_ends_the_sweep(isolated, diary):
    backend = isolated(device=TARGETS["sm_100"])
    with pytest.raises(RunError) as raised:
        backend.open(64)
    said = str(raised.value)
    assert said.startswith(
        "the driver and torch describe this GPU differently: name NVIDIA B200 and NVIDIA H200, sm 100 and 90"
    )
    assert "l2_bytes 132644864 and 62914560" in said
    assert "smem_limit" not in said  # those are equal
    assert diary("open") == []
    assert gone(diary("start")[0]["pid"])


def test_an_import_that_fails_is_said_as_it_failed_first(isolated, imports, monkeypatch):
    monkeypatch.setenv("IMPORT_BREAKS", "1")
    backend = isolated(factory=FACTORY)
    imports(1)
    with pytest.raises(RunError, match=r"could not start: ImportError: attempt 1 failed; run `moetune doctor`"):
        backend.open(64)


@pytest.mark.parametrize("told", [True, False])
def test_one_that_dies_while_it_waits_is_replaced(isolated, diary, imports, told):
    backend = isolated(factory=FACTORY, device=DEVICE)
    (pid,) = imports(1)
    os.kill(pid, signal.SIGKILL)
    if told:
        backend.begin()
    assert backend.open(64) is None
    assert len(imports(2)) == 2
    assert [line["pid"] for line in diary("start")] == imports(2)[1:]


def test_a_new_process_imports_before_it_is_told_too(isolated, diary, imports):
    backend = isolated(Deed(what="abort", method="time_combine", times=1), factory=FACTORY)
    assert isinstance(backend.time_combine(), Failed)
    assert isinstance(backend.time_combine(), Measured)
    assert [line["pid"] for line in diary("start")] == imports(2)


def test_who_waits_for_the_process_is_told_once_and_may_ask_it(isolated, diary):
    backend = isolated(Deed(what="abort", method="time_combine", times=1))
    told = []
    backend.when_ready(lambda: told.append(backend.card()))
    assert told == []
    assert diary() == []
    assert backend.open(64) is None
    assert [state.others[0].pid for state in told] == [4242]
    assert isinstance(backend.time_combine(), Failed)
    assert isinstance(backend.time_routing(16), Measured)
    assert len(told) == 1


def test_a_process_that_ends_in_what_it_is_asked_first_is_replaced(isolated, diary):
    backend = isolated(Deed(what="abort", method="time_combine", times=1))
    backend.when_ready(backend.time_combine)
    assert isinstance(backend.time_routing(16), Measured)
    assert len(diary("start")) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_looked_for_in_what_an_import_makes(tmp_path, monkeypatch, fails):
    name = f"imported_{fails}"
    code = f"import gc\nenabled, things = gc.isenabled(), [[] for _ in range(5000)]\nassert not {fails}\n"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    collections = gc.get_stats()[2]["collections"]
    try:
        error = gpu_worker._preload(name)
        assert isinstance(error, AssertionError) == fails
        assert gc.isenabled()
        assert gc.get_freeze_count() > 5000
    finally:
        gc.unfreeze()
    assert gc.get_stats()[2]["collections"] == collections
    if not fails:
        assert sys.modules[name].enabled is False


# before the tuner itself is loaded


@pytest.fixture
def ahead(monkeypatch):
    """Let this machine have a GPU, as far as its files tell."""
    monkeypatch.setattr(ahead_module, "may_have_gpu", lambda: True)
    monkeypatch.setattr(ahead_module, "PRELOAD", FACTORY.partition(":")[0])


def test_a_process_that_was_started_ahead_is_the_first_one(isolated, diary, imports, ahead):
    with ahead_module.processes_ahead() as processes:
        assert imports(1) == [processes.gpu.pid]
        backend = isolated(factory=FACTORY, ahead=processes.gpu)
        assert backend.open(64) is None
        assert [line["pid"] for line in diary("start")] == [processes.gpu.pid]
        backend.close()
    assert len(imports(1)) == 1


def test_a_live_backend_takes_both_and_ends_both(ahead, imports):
    with ahead_module.processes_ahead() as processes:
        settings = GpuSettings(shape=planted_gpu.SHAPE)
        backend = gpu_isolated.open_isolated(settings, DEVICE, (1,), processes)
        assert (backend._gpu.pid, backend._compiles._pool) == (processes.gpu.pid, processes.pool)
        backend.close()
        assert gone(processes.gpu.pid)
        assert processes.pool._process.poll() is not None


def test_one_that_died_meanwhile_is_replaced(isolated, diary, imports, ahead):
    with ahead_module.processes_ahead() as processes:
        imports(1)
        processes.gpu.kill()
        backend = isolated(factory=FACTORY, ahead=processes.gpu)
        assert backend.open(64) is None
    assert len(imports(2)) == len(diary("start")) + 1 == 2


def test_they_end_with_the_block_however_that_ends(imports, ahead):
    block = ahead_module.processes_ahead()
    processes = block.__enter__()
    assert imports(1) == [processes.gpu.pid]
    assert processes.pool._process.poll() is None
    assert not block.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert gone(processes.gpu.pid)
    assert processes.pool._process.poll() is not None


def test_where_the_second_cannot_be_started_the_first_is_ended(monkeypatch, imports, ahead):
    def full(*_, **__):
        raise OSError("no more processes")

    started, start = [], ahead_module.GpuProcess
    monkeypatch.setattr(ahead_module, "GpuProcess", lambda preload: started.append(start(preload)) or started[0])
    monkeypatch.setattr(kernel_compiles, "CompilePool", full)
    with ahead_module.processes_ahead() as processes:
        assert processes is None
    assert started
    assert all(gone(process.pid) for process in started)


def test_where_none_can_be_started_there_is_none(monkeypatch, ahead):
    monkeypatch.setattr(gpu_process.sys, "executable", "/no/such/python")
    with ahead_module.processes_ahead() as process:
        assert process is None


def missing(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("visible", "build", "driver", "may"),
    [
        (None, TorchBuild("12.8", None), lambda name: None, True),
        ("0", TorchBuild("12.8", None), lambda name: None, True),
        ("", TorchBuild("12.8", None), lambda name: None, False),
        (None, TorchBuild("12.8", None), missing, False),
        (None, TorchBuild(None, None), lambda name: None, False),
        (None, TorchBuild(None, "6.4"), lambda name: None, False),
        (None, None, lambda name: None, False),
    ],
)
def test_it_is_started_where_torch_and_the_driver_are_for_a_gpu(monkeypatch, visible, build, driver, may):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(ahead_module, "torch_build", lambda: build)
    monkeypatch.setattr(ahead_module.ctypes, "CDLL", driver)
    assert ahead_module.may_have_gpu() is may
    if not may:
        with ahead_module.processes_ahead() as process:
            assert process is None


def test_a_torch_that_does_not_say_what_it_is_for_starts_none(monkeypatch):
    monkeypatch.setattr(ahead_module, "torch_build", lambda: missing("version.py"))
    assert not ahead_module.may_have_gpu()
