"""A bad kernel is a failed trial; a lost device ends the run with one sentence."""

from __future__ import annotations

import pytest

from moetune.errors import RunError
from moetune.measure import cuda, faults
from moetune.measure.stopwatch import Stopwatch
from moetune.measure.timer import DeviceHungError
from moetune.outcome import Failed, FailureKind


class OutOfResources(Exception):  # noqa: N818  # the name is what is matched
    """Stands for Triton's, which moves between releases."""


class OutOfMemoryError(RuntimeError):
    """Stands for torch's."""


@pytest.mark.parametrize(
    ("error", "kind", "sticky"),
    [
        (OutOfResources("out of resource: shared memory"), FailureKind.RESOURCES, False),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), FailureKind.RESOURCES, False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), FailureKind.LAUNCH, True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), FailureKind.LAUNCH, True),
        (RuntimeError("CUDA error: unspecified launch failure"), FailureKind.LAUNCH, True),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), FailureKind.LAUNCH, False),
        (DeviceHungError("the GPU did not finish within 30 s"), FailureKind.TIMEOUT, True),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_a_launch_raises_is_judged_by_what_it_did_to_the_device(error, kind, sticky):
    assert faults.failure(error).kind is kind
    assert faults.is_sticky(error) is sticky


@pytest.fixture
def backend(monkeypatch):
    """A backend without its GPU: only what answers questions and judges faults."""
    monkeypatch.setattr(cuda, "finish", lambda: None)
    backend = object.__new__(cuda.CudaBackend)
    backend._lost = backend._side_stream = None
    backend._graphs = backend._new_graphs()
    backend.stopwatch = Stopwatch()
    return backend


def fail(error):
    raise error


def test_a_kernel_that_fails_alone_leaves_the_run_going(backend):
    failed = backend._answer(lambda: fail(OutOfResources("shared memory")))
    assert failed == Failed(FailureKind.RESOURCES, "OutOfResources: shared memory")
    assert backend._answer(lambda: 3.0) == 3.0


def test_after_a_fault_every_question_says_to_run_again(backend):
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert backend._answer(lambda: fail(error)).kind is FailureKind.LAUNCH
    with pytest.raises(RunError, match="run the same command again") as raised:
        backend._answer(lambda: 3.0)
    assert "illegal memory access" in str(raised.value)


def test_a_fault_that_shows_only_at_the_next_wait_is_blamed_on_the_trial_that_made_it(backend, monkeypatch):
    late = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(cuda, "finish", lambda: fail(late))
    failed = backend._answer(lambda: fail(ValueError("something else")))
    assert "illegal memory access" in failed.reason
    with pytest.raises(RunError):
        backend._answer(lambda: 3.0)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_is_no_failed_trial(backend, stop):
    with pytest.raises(stop):
        backend._answer(lambda: fail(stop()))


def test_a_plan_that_stops_the_gpu_comes_back_as_failed_and_so_do_its_rivals(backend, monkeypatch):
    class Graphs:
        def capture(self, run):
            return run()

    monkeypatch.setattr(cuda, "CapturedLayers", lambda stream: Graphs())
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    layers = {"good": lambda: 1.0, "bad": lambda: fail(error), "after": lambda: 1.0}
    backend._open = type("Open", (), {"layer": staticmethod(layers.get)})()
    outcomes = backend.time_layers(["good", "bad", "after"], 4)
    assert "illegal memory access" in outcomes[1].reason
    assert outcomes[0] == outcomes[2] == cuda.NOT_TIMED
