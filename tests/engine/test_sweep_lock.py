"""A sweep on a GPU holds its lock, and what another one took of the time is no part of its budget."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest

from moetune import tuning
from moetune.engine import events
from moetune.engine.budget import Budget
from moetune.measure.gpu_lock import locked
from moetune.measure.gpu_name import Gpu
from moetune.store import Store
from moetune.tuning import SweepRequest
from tests.engine.test_tuning import SHAPE, bed_of

GPU = Gpu(name="NVIDIA H200", index=0, uuid="GPU-1234")
HELD_S = 1.0


@pytest.fixture
def on_gpu(fake_backend, tmp_path, monkeypatch):
    """Let `sweep` find a GPU that is not there; return its backend."""
    backend = fake_backend()
    monkeypatch.setattr(tuning, "_gpu_is_there", lambda: True)
    monkeypatch.setattr(tuning, "gpu_of", lambda index: GPU)
    monkeypatch.setattr(tuning, "lock_dirs", lambda: (tmp_path / "locks",))
    monkeypatch.setattr(tuning, "_gpu_backend", lambda request, ahead: backend)
    monkeypatch.setattr(tuning, "_gpu_bed", lambda backend, request: bed_of(backend, tmp_path))
    return backend


@contextmanager
def another_sweep(folder, seconds):
    """Hold the GPU's lock, as another process would, for so long after the event is set that is given.

    Locks of two opened files exclude each other.
    """
    holds, is_seen = threading.Event(), threading.Event()

    def hold():
        with locked(GPU, [folder], pytest.fail, pytest.fail):
            holds.set()
            assert is_seen.wait(60)
            time.sleep(seconds)

    holder = threading.Thread(target=hold)
    holder.start()
    assert holds.wait(60)
    yield is_seen
    holder.join()


def test_the_wait_for_another_sweep_is_told_and_costs_no_budget(on_gpu, tmp_path, monkeypatch):
    left_s, seen, seen_s, real = [], [], [], tuning.run_on

    def run_on(bed, request, budget, on_event):
        left_s.append((budget.remaining_s, time.monotonic()))
        return real(bed, request, Budget(None), on_event)

    monkeypatch.setattr(tuning, "run_on", run_on)
    with another_sweep(tmp_path / "locks", HELD_S) as is_seen:

        def on_event(event):
            seen.append(event)
            seen_s.append(time.monotonic())
            is_seen.set()

        began_s = time.monotonic()
        tuning.sweep(SweepRequest(shape=SHAPE, tokens=(8,), budget_s=100.0), on_event)
    ((remaining_s, ready_s),) = left_s
    assert ready_s - seen_s[0] >= HELD_S  # it did wait
    assert remaining_s > 97.0 - (ready_s - began_s) + 0.9 * HELD_S
    assert isinstance(seen[0], events.GpuAwaited)
    assert seen[0].gpu == "NVIDIA H200 (GPU-1234)"
    assert seen[0].holder.startswith("process ")
    assert isinstance(seen[1], events.SweepStarted)


def test_a_free_gpu_is_locked_while_it_is_swept_and_let_go(on_gpu, tmp_path):
    taken = []

    def hold(_):
        with pytest.raises(TimeoutError), locked(GPU, [tmp_path / "locks"], refuse, pytest.fail):
            pass
        taken.append(True)

    def refuse(holder):
        raise TimeoutError(holder)

    on_gpu.hooks["open"] = hold
    seen = []
    tuning.sweep(SweepRequest(shape=SHAPE, tokens=(8,)), seen.append)
    assert taken
    assert not [event for event in seen if isinstance(event, events.GpuAwaited)]
    with locked(GPU, [tmp_path / "locks"], pytest.fail, pytest.fail) as waited_s:
        assert waited_s == 0.0
    with Store.to_read(tmp_path / "trials.sqlite") as store:
        (run,) = store.runs()
    assert run.gpu == "GPU-1234"
    assert run.ended_at is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_sweep_that_is_stopped_lets_go(on_gpu, tmp_path, error):
    def stop(_):
        raise error

    on_gpu.hooks["open"] = stop
    with pytest.raises(error):
        tuning.sweep(SweepRequest(shape=SHAPE, tokens=(8,)))
    with locked(GPU, [tmp_path / "locks"], pytest.fail, pytest.fail) as waited_s:
        assert waited_s == 0.0
    with Store.to_read(tmp_path / "trials.sqlite") as store:
        assert [run.ended_at for run in store.runs()] == [None]
    assert on_gpu.calls["close"]


def test_a_gpu_that_cannot_be_locked_is_swept_with_a_warning(on_gpu, tmp_path):
    (tmp_path / "locks").write_text("in the way")
    seen = []
    tuning.sweep(SweepRequest(shape=SHAPE, tokens=(8,)), seen.append)
    (warning,) = [event.text for event in seen if isinstance(event, events.Warned)][:1]
    assert warning.startswith("NVIDIA H200 (GPU-1234) cannot be locked, so another sweep")
