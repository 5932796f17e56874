"""Whether there is a GPU, and which one, is known without torch; where the driver cannot tell, torch is asked as before."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from moetune.measure import gpu_device, gpu_driver
from moetune.measure.gpu_device import TorchBuild, driver_device, gpu_is_there, torch_build
from moetune_kernels.device import TARGETS
from moetune_kernels.errors import UnsupportedDeviceError

H200 = TARGETS["sm_90"]
ATTRIBUTES = {16: H200.sm_count, 38: H200.l2_bytes, 75: 9, 76: 0, 97: H200.smem_limit}  # of cuda.h


def driver(*, name=H200.name, count=1, version=13000, attributes=ATTRIBUTES, fails=""):
    """Return the functions of libcuda that describe a device; ``fails`` names one that answers with an error."""

    def put(target, value):
        target._obj.value = value
        return 0

    def put_name(buffer, size, device):
        buffer.value = name.encode()[: size - 1]
        return 0

    functions = {
        "cuInit": lambda flags: 0,
        "cuDriverGetVersion": lambda target: put(target, version),
        "cuDeviceGetCount": lambda target: put(target, count),
        "cuDeviceGet": put,
        "cuDeviceGetName": put_name,
        "cuDeviceTotalMem_v2": lambda target, device: put(target, H200.memory_bytes),
        "cuDeviceGetAttribute": lambda target, number, device: put(target, attributes[number]),
    }
    if fails:
        functions[fails] = lambda *arguments: 100  # CUDA_ERROR_NO_DEVICE
    return SimpleNamespace(**functions)


@pytest.fixture
def here(monkeypatch):
    """Return a function that lets this machine have a driver (None: none) and a torch that says what it was built for."""

    def here(library, *, cuda="13.0", hip=None, torch_says=False):
        def load(name):
            assert name == "libcuda.so.1"
            if library is None:
                raise OSError(f"{name}: cannot open shared object file")
            return library

        asked = []
        monkeypatch.setattr(gpu_driver.ctypes, "CDLL", load)
        monkeypatch.setattr(gpu_device, "torch_build", lambda: TorchBuild(cuda, hip))
        monkeypatch.setattr(gpu_device, "_torch_sees_one", lambda: asked.append(True) or torch_says)
        return asked

    return here


@pytest.mark.parametrize(
    ("found", "library", "build"),
    [
        pytest.param(True, driver(), {}, id="a GPU, its driver and a torch for it"),
        pytest.param(True, driver(version=13010), {"cuda": "13.0"}, id="a newer driver"),
        pytest.param(True, driver(version=12000), {"cuda": "12.8"}, id="a driver of an older minor version"),
        pytest.param(True, driver(count=8), {"cuda": "11.8"}, id="an older CUDA"),
        pytest.param(False, driver(version=12080), {"cuda": "13.0"}, id="a driver too old for torch"),
        pytest.param(False, None, {}, id="no driver"),
        pytest.param(False, driver(fails="cuInit"), {}, id="CUDA_VISIBLE_DEVICES is empty"),
        pytest.param(False, driver(count=0), {}, id="no device"),
        pytest.param(False, driver(), {"cuda": None}, id="a torch built for CPUs"),
    ],
)
def test_a_gpu_is_there_where_torch_would_find_it(here, found, library, build):
    asked = here(library, **build)
    assert gpu_is_there() is found
    assert asked == []


@pytest.mark.parametrize("says", [True, False])
def test_torch_is_asked_where_only_it_knows(here, monkeypatch, says):
    asked = here(None, cuda=None, hip="7.0", torch_says=says)
    assert gpu_is_there() is says
    here(SimpleNamespace(), torch_says=says)  # a driver without these functions
    assert gpu_is_there() is says
    here(driver(), cuda="local", torch_says=says)
    assert gpu_is_there() is says
    assert asked == [True]
    here(driver(), torch_says=says)

    def broken():
        raise ValueError

    monkeypatch.setattr(gpu_device, "torch_build", broken)
    assert gpu_is_there() is says


def test_without_torch_there_is_no_gpu(here, monkeypatch):
    here(driver(), torch_says=True)
    monkeypatch.setattr(gpu_device, "torch_build", lambda: None)
    assert gpu_is_there() is False


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", TorchBuild("12.8", None)),
        ("cuda = None\nhip = '6.4.43484'\nraise SystemExit\n", TorchBuild(None, "6.4.43484")),
        ("__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", TorchBuild(None, None)),
    ],
)
def test_what_torch_was_built_for_is_read_and_not_run(monkeypatch, tmp_path, text, build):
    (tmp_path / "version.py").write_text(text)
    monkeypatch.setattr(gpu_device, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert torch_build() == build


@pytest.mark.parametrize(
    "text", [None, "cuda = '12.8'\n", "cuda = hip = 12\n", "cuda = version()\nhip = None\n", "cuda ="]
)
def test_a_torch_that_does_not_say_what_it_was_built_for_is_asked(here, monkeypatch, tmp_path, text):
    asked = here(driver())
    monkeypatch.setattr(gpu_device, "torch_build", torch_build)
    monkeypatch.setattr(gpu_device, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    if text is not None:
        (tmp_path / "version.py").write_text(text)
    assert gpu_is_there() is False
    assert asked == [True]


def test_the_build_of_the_installed_torch_is_what_torch_says_itself():
    import torch

    assert torch_build() == TorchBuild(torch.version.cuda, torch.version.hip)


def test_the_driver_describes_a_device_as_torch_does(here):
    here(driver())
    assert driver_device(0) == H200
    here(driver(attributes=ATTRIBUTES | {75: 8, 76: 6}))
    assert driver_device(0).sm == 86


@pytest.mark.parametrize(
    "library",
    [
        pytest.param(driver(name="NVIDIA H200 MIG 1g.18gb"), id="a MIG slice"),
        pytest.param(driver(fails="cuDeviceGetAttribute"), id="a driver that does not answer"),
        pytest.param(driver(attributes=ATTRIBUTES | {38: 0}), id="a size that cannot be"),
        pytest.param(None, id="no driver"),
    ],
)
def test_what_the_driver_cannot_tell_is_left_to_the_gpu_process(here, library):
    here(library)
    assert driver_device(0) is None


@pytest.mark.parametrize("index", [1, -1])
def test_a_device_that_is_not_there_is_refused(here, index):
    here(driver())
    with pytest.raises(UnsupportedDeviceError, match=f"no CUDA device {index}: the driver sees 1"):
        driver_device(index)


def test_neither_question_loads_torch():
    code = "import sys; from moetune.measure import gpu_device as g; g.gpu_is_there(); g.driver_device(0); print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
