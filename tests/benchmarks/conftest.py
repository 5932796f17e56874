"""Lets these tests import the benchmarks, which are scripts, and gives them a GPU that is not there."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))

from moetune.measure.gpu_name import Gpu  # noqa: E402
from moetune.store import Store  # noqa: E402
from tests.engine.conftest import FakeBackend  # noqa: E402
from tests.engine.test_tuning import provenance_of  # noqa: E402

GPU = Gpu(name="NVIDIA H200", index=0, uuid="GPU-0")
LIVE = (sys.executable, str(HERE / "live.py"))
CARD_BYTES = 150 * 10**9


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml:
    """Answers as pynvml does, by its names; ``samples`` are (microseconds, percent), or the error that is raised."""

    NVML_GPU_UTILIZATION_SAMPLES, NVML_CLOCK_SM, NVML_ERROR_NOT_FOUND = 1, 1, 6
    NVMLError = NVMLError

    def __init__(self, samples=(), rate=37, used=10**9):
        self.samples, self.rate, self.used, self.asked = samples, rate, used, []

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetSamples(self, handle, kind, since_us):  # noqa: N802
        if isinstance(self.samples, Exception):
            raise self.samples
        new = [(stamp, value) for stamp, value in self.samples if stamp > since_us]
        if not new:
            raise NVMLError(self.NVML_ERROR_NOT_FOUND)
        value = ctypes.c_uint
        return 1, [SimpleNamespace(timeStamp=stamp, sampleValue=_value(value(percent))) for stamp, percent in new]

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        return SimpleNamespace(gpu=self.rate)

    def nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        return 1980

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(used=self.used, total=CARD_BYTES)


def _value(value):
    return SimpleNamespace(uiVal=value.value, dVal=float("nan"), ullVal=1 << 60)


@pytest.fixture
def fake_nvml():
    return FakeNvml


@pytest.fixture
def gpu_here(monkeypatch):
    """Say of the GPU that is not there that it is: only the one question, so that no CUDA is started."""
    monkeypatch.setattr("command.gpu_of", lambda index: GPU)
    return GPU


@pytest.fixture
def live_store(tmp_path):
    """Return a function that writes runs of trials into one store; each run gets its own id, and ends unless told."""

    def write(*runs, ends=True, driver=None):
        from dataclasses import replace

        made_for = provenance_of(FakeBackend())
        if driver is not None:
            made_for = replace(made_for, driver=driver)
        with Store(tmp_path / "trials.sqlite") as store:
            for trials in runs:
                run = store.begin(made_for, "moetune sweep", "GPU-0")
                for trial in trials:
                    run.record(trial)
                if ends:
                    run.end()
        return tmp_path / "trials.sqlite"

    return write
