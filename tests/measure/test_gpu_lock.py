"""One sweep at a time on one GPU, seen from two processes."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moetune.measure import gpu_lock, gpu_name
from moetune.measure.gpu_lock import Holder, locked
from moetune.measure.gpu_name import Gpu, gpu_of
from moetune_kernels.device import TARGETS
from moetune_kernels.errors import UnsupportedDeviceError

H200 = Gpu(name="NVIDIA H200", index=0, uuid="GPU-8f5c7a6e-0000-1111-2222-333344445555")
HOLDER = """
import sys
from pathlib import Path
from moetune.measure.gpu_lock import locked
from moetune.measure.gpu_name import Gpu

uuid, folder = sys.argv[1] or None, Path(sys.argv[2])
sys.argv[1:] = ["sweep", "--model", "mixtral-8x7b"]
say = lambda text: print(f"waits: {text}", flush=True)
with locked(Gpu(name="NVIDIA H200", index=0, uuid=uuid), [folder], say, say):
    print("holds", flush=True)
    sys.stdin.readline()
print("let go", flush=True)
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a process which takes a GPU's lock and holds it until it reads a line."""
    started = []

    def start(uuid=H200.uuid, folder=tmp_path / "locks"):
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", HOLDER, uuid or "", str(folder)]
        started.append(subprocess.Popen(command, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=60)


def take(gpu, folder):
    """Take and release a lock; return what was said on the way and the seconds that were waited."""
    said = []
    with locked(gpu, [folder], said.append, said.append) as waited_s:
        pass
    return said, waited_s


def test_the_second_sweep_waits_says_for_whom_and_goes_on(start, tmp_path):
    first = start()
    assert first.stdout.readline() == "holds\n"
    second = start()
    said = second.stdout.readline()
    pattern = (
        rf"waits: process {first.pid}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC: moetune sweep --model mixtral-8x7b\n"
    )
    assert re.fullmatch(pattern, said), said
    first.stdin.write("\n")
    first.stdin.flush()
    assert first.stdout.readline() == "let go\n"
    assert second.stdout.readline() == "holds\n"
    assert first.wait(timeout=60) == 0


def test_a_third_sweep_is_told_when_the_holder_changes(start):
    first = start()
    assert first.stdout.readline() == "holds\n"
    others = [start(), start()]
    assert [f"process {first.pid}," in other.stdout.readline() for other in others] == [True, True]
    first.kill()
    said = dict.fromkeys(others, "")
    while not any(
        "holds\n" in said[holds] and f"waits: process {holds.pid}," in said[waits]
        for holds, waits in (others, others[::-1])
    ):
        for process in select.select([other.stdout for other in others], [], [], 60)[0]:
            owner = next(other for other in others if other.stdout is process)
            said[owner] += process.readline()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_holder_that_dies_lets_go(start, tmp_path, how):
    first = start()
    assert first.stdout.readline() == "holds\n"
    first.send_signal(how)
    assert first.wait(timeout=60) == -how
    assert take(H200, tmp_path / "locks") == ([], 0.0)


def test_the_wait_is_measured(start, tmp_path):
    first = start()
    assert first.stdout.readline() == "holds\n"
    said = []

    def let_go(text):
        said.append(text)
        first.stdin.write("\n")
        first.stdin.flush()

    began_s = time.monotonic()
    with locked(H200, [tmp_path / "locks"], let_go, said.append) as waited_s:
        lasted_s = time.monotonic() - began_s
    assert len(said) == 1
    assert gpu_lock.PAUSE_S <= waited_s <= lasted_s
    assert waited_s == pytest.approx(lasted_s, abs=2.0)


def test_ctrl_c_ends_the_wait_and_leaves_the_lock_to_its_holder(start, tmp_path):
    first = start()
    assert first.stdout.readline() == "holds\n"
    second = start()
    assert second.stdout.readline().startswith("waits: ")
    second.send_signal(signal.SIGINT)
    _, complaint = second.communicate(timeout=60)
    assert second.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in complaint
    third = start()
    assert f"process {first.pid}," in third.stdout.readline()


@pytest.mark.parametrize(
    "other", ["GPU-8f5c7a6e-0000-1111-2222-333344445556", "MIG-8f5c7a6e-0000-1111-2222-333344445555", None]
)
def test_other_gpus_and_slices_do_not_wait(start, tmp_path, other):
    first = start()
    assert first.stdout.readline() == "holds\n"
    assert take(replace(H200, uuid=other), tmp_path / "locks") == ([], 0.0)


def test_without_a_uuid_name_and_index_stand_for_the_gpu(start, tmp_path):
    first = start(uuid=None)
    assert first.stdout.readline() == "holds\n"
    nameless = replace(H200, uuid=None)
    assert take(replace(nameless, index=1), tmp_path / "locks") == ([], 0.0)
    second = start(uuid=None)
    assert f"process {first.pid}," in second.stdout.readline()
    assert str(nameless) == "NVIDIA H200 (device 0)"


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 5000, b"[" * 4000, b'{"pid": "1"}', b'{"pid": 1, "host": 2, "since": "", "command": ""}', b"null"],
    ids=["empty", "binary", "nested", "text-pid", "number-host", "null"],
)
def test_a_lock_file_that_says_nothing_sensible_still_locks(start, tmp_path, content):
    first = start()
    assert first.stdout.readline() == "holds\n"
    (lock,) = (tmp_path / "locks").iterdir()
    lock.write_bytes(content)
    assert Holder.parse(content[: gpu_lock.MAX_HOLDER_BYTES]) is None
    second = start()
    assert second.stdout.readline() == "waits: another process\n"


def test_a_folder_that_cannot_be_used_leaves_the_next(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with locked(H200, [tmp_path / "file" / "locks", tmp_path / "locks"], pytest.fail, pytest.fail):
        (lock,) = (tmp_path / "locks").iterdir()
    assert lock.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("way", ["a-file", "a-link", "no-locks", "somebody-elses"])
def test_a_gpu_that_cannot_be_locked_is_swept_all_the_same_and_said(tmp_path, monkeypatch, way):
    folder = tmp_path / "locks"
    if way == "a-file":
        folder.write_text("in the way")
    elif way == "a-link":
        folder.symlink_to(tmp_path)
    elif way == "somebody-elses":
        monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    else:
        monkeypatch.setattr(gpu_lock, "_try", lambda held: (_ for _ in ()).throw(OSError(37, "No locks available")))
    said, waited_s = take(H200, folder)
    assert len(said) == 1
    assert str(folder) in said[0]
    assert waited_s == 0.0
    assert [entry for entry in tmp_path.iterdir() if entry.name.startswith("gpu-")] == []


def test_a_key_is_a_safe_file_name():
    odd = Gpu(name="../GeForce RTX™ 5090/ Ti" * 20, index=3, uuid=None)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,120}", odd.key)
    assert "/" not in odd.key
    assert H200.key == H200.uuid


def driver(name="NVIDIA H200", fails=""):
    """Return the few functions of libcuda that name a device; ``fails`` names one that is missing or answers with 999."""

    def put(target, value):
        target._obj.value = value
        return 0

    def put_name(buffer, size, device):
        buffer.value = name.encode()[: size - 1]
        return 0

    def put_uuid(buffer, device):
        buffer.raw = bytes(range(15)) + bytes([device.value])
        return 0

    functions = {
        "cuInit": lambda flags: 0,
        "cuDeviceGetCount": lambda count: put(count, 8),
        "cuDeviceGet": put,
        "cuDeviceGetName": put_name,
        "cuDeviceGetUuid_v2": put_uuid,
    }
    if fails == "cuDeviceGetUuid_v2":  # drivers before CUDA 11.4
        del functions[fails]
    elif fails in functions:
        functions[fails] = lambda *arguments: 999
    return SimpleNamespace(**functions)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", "NVIDIA H200 (GPU-00010203-0405-0607-0809-0a0b0c0d0e03)"),
        ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 MIG 1g.18gb (MIG-00010203-0405-0607-0809-0a0b0c0d0e03)"),
    ],
)
def test_a_gpu_is_named_as_the_driver_knows_it(monkeypatch, name, found):
    monkeypatch.setattr(gpu_name.ctypes, "CDLL", lambda library: driver(name))
    assert str(gpu_of(3)) == found


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGetName", "cuDeviceGetUuid_v2", "library"])
def test_a_driver_that_does_not_answer_leaves_torchs_name(monkeypatch, fails):
    def load(library):
        if fails == "library":
            raise OSError(f"{library}: cannot open shared object file")
        return driver(fails=fails)

    monkeypatch.setattr(gpu_name.ctypes, "CDLL", load)
    monkeypatch.setattr("moetune_kernels.device.device_info", lambda index: TARGETS["gfx942"])
    assert str(gpu_of(3)) == "AMD Instinct MI300X (device 3)"


@pytest.mark.parametrize("index", [8, -1])
def test_a_device_that_is_not_there_is_refused(monkeypatch, index):
    monkeypatch.setattr(gpu_name.ctypes, "CDLL", lambda library: driver())
    with pytest.raises(UnsupportedDeviceError, match=f"no CUDA device {index}: the driver sees 8"):
        gpu_of(index)


def test_lock_folders_are_the_users_own(monkeypatch, tmp_path):
    from moetune.store import lock_dirs

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    state, temporary = lock_dirs()
    assert state == tmp_path / "moetune" / "locks"
    assert str(os.geteuid()) in temporary.name
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert lock_dirs() == (temporary,)
