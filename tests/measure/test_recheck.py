"""The live backend's comparisons after timing, with the GPU's part played by torch on the CPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moetune.measure import cuda, open_count, problem
from moetune.measure.clocks import Clocks, ClockWatch
from moetune.measure.open_count import OpenCount
from moetune.measure.stopwatch import Stopwatch
from moetune.measure.timer import Replay, Sample
from moetune.outcome import Failed, FailureKind, Figure, Measured
from moetune_kernels.config import Role
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape
from tests.measure import faults_planted as kinds
from tests.measure.planted import ALL_TOUCHED, CONFIG, PLAN, Planted, Right, opened, right_layer

OTHER = LayerPlan(gate_up=replace(CONFIG, num_warps=8), down=CONFIG)
NONE = Figure.unavailable("not counted here")


class Graphs:
    """Captures by running once; a replay writes to the memory of the capture, as a graph's does."""

    def __init__(self, stream):
        self.live = []

    def capture(self, run):
        out = run()

        def replay():
            assert any(one.output is out for one in self.live)
            out.copy_(run())

        self.live.append(Replay(replay, out))
        return self.live[-1]

    def drop(self, replay):
        assert len(self.live) > 1
        self.live = [one for one in self.live if one is not replay]

    def close(self):
        self.live = []


class OnePool(Graphs):
    """Graphs that lay their own tensors where each other's output is, as those of one memory pool do."""

    def __init__(self, stream):
        super().__init__(stream)
        self.outputs = []

    def capture(self, run):
        alone = super().capture(run)
        self.outputs.append(alone.output)

        def replay():
            for output in self.outputs:
                output.fill_(7.0)
            alone()

        self.live[-1] = Replay(replay, alone.output)
        return self.live[-1]


class Timer:
    """Launches as often as it is told to and reads no clock."""

    def rounds(self, launches, count, meanwhile=None, after_last=lambda _: None):
        for turn in range(count):
            for place, launch in enumerate(launches):
                launch()
                if turn == count - 1:
                    after_last(place)
        return [[1.0] * count for _ in launches]

    def sample(self, launch, samples):
        self.rounds([launch], samples + 1)
        return Sample(1.0, 0.0, samples)


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(cuda, "finish", lambda: None)
    monkeypatch.setattr(cuda, "CapturedLayers", Graphs)
    backend = object.__new__(cuda.CudaBackend)
    backend._lost = backend._side_stream = None
    backend._graphs = backend._new_graphs()
    backend.stopwatch = Stopwatch()
    backend._shape, backend._timer, backend._open = ALL_TOUCHED[0], Timer(), opened(ALL_TOUCHED)
    backend._watch = ClockWatch(Clocks(None))  # of no GPU: every reading is empty
    backend._instructions = lambda role, config: None
    backend._issue_rate = lambda: SimpleNamespace(efficiency=lambda *_: NONE)
    return backend


def layers(monkeypatch, wrong):
    """One plan runs ``wrong`` from the third time on, any other the right layer."""
    Planted(Right()).install(monkeypatch)
    runs = []

    def run(x, weights, logits, routing, plan):
        out = right_layer(x, weights, logits, routing, plan)
        runs.append(plan)
        return wrong(out) if plan == OTHER and runs.count(OTHER) > 2 else out

    monkeypatch.setattr(problem, "moe_from_logits", run)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [(lambda out: out * 1.1, "relative L2"), (lambda out: torch.full_like(out, torch.nan), "16 of 16 rows")],
    ids=["off", "unwritten"],
)
def test_a_layer_whose_last_replay_is_wrong_has_no_time(backend, monkeypatch, wrong, reason):
    layers(monkeypatch, wrong)
    good, bad = backend.time_layers([PLAN, OTHER], 6)
    assert isinstance(good, Measured)
    assert isinstance(bad, Failed)
    assert bad.kind is FailureKind.WRONG
    assert bad.reason.startswith("layer: after timing: ")
    assert reason in bad.reason


def test_a_layer_is_judged_by_what_it_left_before_the_next_graph_wrote_there(backend, monkeypatch):
    layers(monkeypatch, lambda out: out)
    monkeypatch.setattr(cuda, "CapturedLayers", OnePool)
    assert all(isinstance(outcome, Measured) for outcome in backend.time_layers([PLAN, OTHER], 6))


def test_what_was_captured_is_no_answer_of_a_replay(backend, monkeypatch):
    layers(monkeypatch, lambda out: out)
    monkeypatch.setattr(Graphs, "capture", lambda self, run: Replay(lambda: None, run()))
    (idle,) = backend.time_layers([PLAN], 6)
    assert "16 of 16 rows are not finite" in idle.reason


def test_a_plan_is_captured_once_per_token_count_and_one_that_left_a_heat_is_freed(backend, monkeypatch):
    layers(monkeypatch, lambda out: out)
    captured, pools = [], []

    class Counted(Graphs):
        def __init__(self, stream):
            super().__init__(stream)
            pools.append(self)

        def capture(self, run):
            captured.append(run)
            return super().capture(run)

    monkeypatch.setattr(cuda, "CapturedLayers", Counted)
    third = LayerPlan(gate_up=OTHER.gate_up, down=OTHER.gate_up)
    for plans, captures, alive in (
        ([PLAN, OTHER], 2, 2),
        ([PLAN, OTHER], 2, 2),
        ([OTHER], 2, 1),
        ([PLAN, OTHER], 3, 2),
    ):
        assert all(isinstance(outcome, Measured) for outcome in backend.time_layers(plans, 2))
        assert (len(captured), [len(pool.live) for pool in pools]) == (captures, [alive])
    assert isinstance(backend.time_layers([third], 2)[0], Measured)
    assert [len(pool.live) for pool in pools] == [0, 1]  # a pool whose last graph is gone is not used again
    backend.time_rerouted([PLAN], 2)
    assert not any(pool.live for pool in pools)


def test_other_routings_are_timed_though_no_truth_of_theirs_is_known(backend, monkeypatch):
    layers(monkeypatch, lambda out: out)
    routed = backend.time_rerouted([PLAN, OTHER], 4)
    assert all(isinstance(outcome, Measured) for outcomes in routed for outcome in outcomes)


@pytest.mark.parametrize("role", Role)
def test_a_kernel_that_goes_wrong_while_it_is_timed_is_found_in_what_it_left(backend, monkeypatch, role):
    kernel = Planted(kinds.RacesWhenCold(), (role,)).install(monkeypatch)
    assert backend.verify_kernel(role, CONFIG) is None
    kernel.cold = True
    assert isinstance(backend.time_kernel(role, CONFIG, 25), Measured)
    kernel.cold = False
    wrong = backend.recheck_kernel(role, CONFIG)
    assert wrong.kind is FailureKind.WRONG
    assert wrong.reason.startswith(f"{role.value}: after timing: relative L2 error")


def test_a_kernel_is_compared_with_what_it_left_itself(backend, monkeypatch):
    Planted(Right()).install(monkeypatch)
    backend.time_kernel(Role.DOWN, CONFIG, 3)
    failed = backend.recheck_kernel(Role.DOWN, replace(CONFIG, num_warps=8))
    assert "right after it was timed" in failed.reason


LARGE = MoEShape(hidden=4096, inter=14336, local_experts=64, top_k=2)
QWEN = MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8)


@pytest.mark.parametrize(
    ("shape", "touched", "routed", "groups"),
    [(QWEN, 64, 128, 4), (LARGE, 2, 2, 4), (LARGE, 64, 256, 0), (QWEN, 128, 65536, 2), (QWEN, 128, 131072, 0)],
    ids=["decode", "two-large-experts", "15-gb-a-launch", "8192-tokens", "16384-tokens"],
)
def test_a_burst_is_as_long_as_its_kernel_is_quick(shape, touched, routed, groups):
    count = SimpleNamespace(shape=shape, truth=SimpleNamespace(touched=touched, routed=routed))
    assert OpenCount._burst_groups(count, Role.GATE_UP) == groups


def test_a_kernel_meets_the_odd_problems_once_and_each_token_count_s_own(monkeypatch):
    kernel, count = Planted(Right()).install(monkeypatch), opened(ALL_TOUCHED)
    launches = []
    for _ in range(2):
        assert count.verify_gemm(Role.DOWN, CONFIG) is None
        launches.append(kernel.number)
    assert launches == [2 + len(count.odd.problems()), 4 + len(count.odd.problems())]
    assert count.verify_gemm(Role.DOWN, replace(CONFIG, num_warps=8)) is None
    assert kernel.number == 6 + 2 * len(count.odd.problems())


def test_a_wrong_kernel_is_not_remembered_as_right(monkeypatch):
    Planted(kinds.WrongForOneToken()).install(monkeypatch)
    count = opened(ALL_TOUCHED)
    for _ in range(2):
        assert "one token" in count.verify_gemm(Role.DOWN, CONFIG).reason


def test_many_slots_meet_no_second_seed_of_their_own_size_as_kernels_but_as_a_layer(monkeypatch):
    monkeypatch.setattr(open_count, "OTHER_SEED_SLOTS", 31)
    kernel = Planted(Right()).install(monkeypatch)
    count = opened(ALL_TOUCHED)
    assert count.verify_gemm(Role.DOWN, CONFIG) is None
    assert kernel.number == 1 + len(count.odd.problems())
    monkeypatch.setattr(problem, "moe_from_logits", kinds.LAYER_KINDS["knows the rows that are timed"][0]())
    assert count.verify_layer(PLAN).reason.startswith("layer: another seed: ")
