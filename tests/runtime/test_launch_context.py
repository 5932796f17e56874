"""Kernels launch on the tensor's own device, and may be loaded while a CUDA graph is captured."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from moetune_kernels import launch_context
from moetune_kernels.launch_context import launching_on

GLOBAL, RELAXED = 0, 2


@pytest.fixture
def driver(monkeypatch):
    """Replace what a GPU answers; ``device`` and ``mode`` are what a launch would meet."""
    state = SimpleNamespace(device=0, mode=GLOBAL, capturing=False, refuses=False)

    @contextmanager
    def device(index):
        before, state.device = state.device, index
        try:
            yield
        finally:
            state.device = before

    def exchange(reference):
        if state.refuses:
            return 3  # CUDA_ERROR_NOT_INITIALIZED
        given = reference._obj
        state.mode, given.value = given.value, state.mode
        return 0

    cuda = SimpleNamespace(device=device, is_current_stream_capturing=lambda: state.capturing)
    monkeypatch.setattr(launch_context, "torch", SimpleNamespace(cuda=cuda, Tensor=object))
    monkeypatch.setattr(launch_context, "_exchange_capture_mode", lambda: exchange)
    return state


ON_ONE = SimpleNamespace(is_cuda=True, device=1)


def test_the_tensors_device_is_current_while_launching_and_the_callers_after(driver):
    with launching_on(ON_ONE):
        assert (driver.device, driver.mode) == (1, GLOBAL)
    assert driver.device == 0


def test_a_capture_is_relaxed_for_the_launches_alone(driver):
    driver.capturing = True
    with launching_on(ON_ONE):
        assert (driver.device, driver.mode) == (1, RELAXED)
    assert (driver.device, driver.mode) == (0, GLOBAL)


def test_an_error_in_a_launch_restores_device_and_mode(driver):
    driver.capturing = True
    with pytest.raises(RuntimeError, match="lost"), launching_on(ON_ONE):
        raise RuntimeError("lost")
    assert (driver.device, driver.mode) == (0, GLOBAL)


def test_a_driver_that_refuses_or_is_absent_changes_nothing(driver, monkeypatch):
    driver.capturing, driver.refuses = True, True
    with launching_on(ON_ONE):
        assert driver.mode == GLOBAL
    monkeypatch.setattr(launch_context, "_exchange_capture_mode", lambda: None)
    with launching_on(ON_ONE):
        assert (driver.device, driver.mode) == (1, GLOBAL)


def test_a_cpu_tensor_asks_no_driver(driver):
    driver.capturing = True
    with launching_on(SimpleNamespace(is_cuda=False)):
        assert (driver.device, driver.mode) == (0, GLOBAL)


def test_a_machine_without_the_driver_has_no_such_call(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(launch_context.ctypes, "CDLL", absent)
    launch_context._exchange_capture_mode.cache_clear()
    assert launch_context._exchange_capture_mode() is None
    launch_context._exchange_capture_mode.cache_clear()
