"""Comparisons that are queued and read together: few waits, and nothing that one at a time would have found is lost."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch

from moetune.measure import odd, open_count
from moetune.measure.compare import Reference, gemm_limit, is_match, why_gemm_differs
from moetune.measure.guarded import GUARD_ROWS, GuardedRows
from moetune.measure.verdict import Queued, first_wrong, verdicts
from moetune.outcome import Failed, FailureKind
from moetune_kernels.config import Role
from moetune_kernels.shape import WeightFormat
from tests.measure import faults_planted as kinds
from tests.measure.planted import ALL_TOUCHED, CONFIG, ONE_OF_TWO_RANKS, PLAN, Planted, Right, opened
from tests.measure.test_planted import fresh_odd

BF16, LIMIT = WeightFormat.BF16, gemm_limit(WeightFormat.BF16)
WAITS = ("tolist", "item", "nonzero", "__bool__", "__float__", "__int__", "__index__")


@pytest.fixture
def waits(monkeypatch):
    """Return a counter of what would make a host wait for a GPU, where the measuring code does it."""
    counted = Counter()

    def counting(name):
        whole = getattr(torch.Tensor, name)

        def wait(*args, **named):
            if "/moetune/measure/" in sys._getframe(1).f_code.co_filename:
                counted[name] += 1
            return whole(*args, **named)

        return wait

    for name in WAITS:
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    return counted


@pytest.mark.parametrize("setup", [ALL_TOUCHED, ONE_OF_TWO_RANKS], ids=["all-experts", "one-of-two-ranks"])
def test_a_right_kernel_is_waited_for_once_before_timing_and_twice_after_it(monkeypatch, waits, setup):
    Planted(Right()).install(monkeypatch)
    count = opened(setup)
    assert count.verify_gemm(Role.DOWN, CONFIG) is None  # makes what is made once
    for role in Role:
        count.odd = fresh_odd(count)
        waits.clear()
        assert count.verify_gemm(role, CONFIG) is None
        assert waits == {"tolist": 1}
        waits.clear()
        count.timed_gemm(role, CONFIG)()
        assert count.recheck_gemm(role, CONFIG) is None
        assert waits == {"tolist": 2}


def test_a_right_layer_is_waited_for_once_and_all_of_a_heat_together(monkeypatch, waits):
    Planted(Right()).install(monkeypatch)
    count = opened(ALL_TOUCHED)
    assert count.verify_layer(PLAN) is None
    count.odd = fresh_odd(count)
    waits.clear()
    assert count.verify_layer(PLAN) is None
    assert waits == {"tolist": 1}
    out = count.layer(PLAN)()
    waits.clear()
    assert count.recheck_layers([out] * 5) == [None] * 5
    assert waits == {"tolist": 1}


def test_each_layer_of_a_heat_has_its_own_verdict(monkeypatch):
    Planted(Right()).install(monkeypatch)
    count = opened(ALL_TOUCHED)
    out = count.layer(PLAN)()
    first, wrong, last = count.recheck_layers([out, out * 1.1, out])
    assert (first, last) == (None, None)
    assert wrong.reason.startswith("layer: after timing: relative L2 error")


def test_a_truth_is_computed_once_for_rows_that_kernels_and_layers_meet(monkeypatch):
    Planted(Right()).install(monkeypatch)
    count, made = opened(ALL_TOUCHED), []
    for module, name in ((open_count, "kernel_truth"), (odd, "layer_truth"), (odd, "routed_truth")):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, whole=whole, name=name: made.append(name) or whole(*args))
    for _ in range(2):
        assert all(count.verify_gemm(role, CONFIG) is None for role in Role)
        assert count.verify_layer(PLAN) is None
    assert made == ["kernel_truth"]  # of another seed; the odd ones are every token count's


@pytest.mark.parametrize("role", Role)
def test_every_problem_that_a_kernel_spoilt_is_put_back_at_once(monkeypatch, role):
    count = opened(ALL_TOUCHED)
    Planted(Right()).install(monkeypatch)
    assert count.verify_gemm(role, CONFIG) is None
    count.odd = fresh_odd(count)
    Planted(kinds.WritesToItsInputs(), (role,)).install(monkeypatch)
    assert "wrote to its inputs" in count.verify_gemm(role, CONFIG).reason
    problems = [count.timed, count._other, *count.odd.problems()]
    assert [problem.name for problem in problems if problem.restore()] == []


class WrongOnce(kinds.Races):
    """One launch of all is wrong."""

    wrong = 0

    def when(self, launch):
        return launch.number == self.wrong


@pytest.mark.parametrize(("wrong", "group"), [(2, 2), (3, 1), (7, 4), (10, 3)])
@pytest.mark.parametrize("role", Role)
def test_a_group_of_a_burst_is_judged_by_what_it_left_though_the_next_wrote_there(monkeypatch, role, wrong, group):
    count, fault = opened(ALL_TOUCHED), WrongOnce()
    kernel = Planted(fault, (role,)).install(monkeypatch)
    count.timed_gemm(role, CONFIG)()
    fault.wrong = kernel.number + wrong
    found = count.recheck_gemm(role, CONFIG)
    assert found.reason.startswith(f"{role.value}: timing inputs: relative L2 error")
    assert f"in a burst of {group} launches" in found.reason


def wrong_outputs():
    generator = torch.Generator().manual_seed(4)
    want = torch.randn((64, 256), generator=generator)
    want[9] = 0.0
    right = want.bfloat16()
    yield "right", right, want
    for name, row, column, value in (
        ("nan", 5, 7, float("nan")),
        ("infinite", 5, 7, float("inf")),
        ("zero row", 9, 0, 0.01),
        ("first element", 0, 0, float(want[0, 0]) + 0.1),
        ("last element", 63, 255, float(want[63, 255]) - 0.1),
    ):
        got = right.clone()
        got[row, column] = value
        yield name, got, want
    yield "a row off", torch.where(torch.arange(64)[:, None] == 3, 1.02 * want, want).bfloat16(), want
    yield "all a little off", (1.004 * want).bfloat16(), want
    yield "all within", (1.001 * want).bfloat16(), want
    yield "no rows", right[:0], want[:0]


@pytest.mark.parametrize(
    ("name", "got", "want"), list(wrong_outputs()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_numbers_and_the_words_agree(name, got, want):
    before = want.clone()
    numbers = Reference(want).numbers(got, LIMIT).tolist()
    why = why_gemm_differs(got, want, BF16)
    assert is_match(numbers, LIMIT) == (why is None), (numbers, why)
    assert (why is None) == (name in ("right", "all within", "no rows"))
    assert torch.equal(want, before)


def test_a_reference_survives_an_output_in_its_own_precision():
    want = -torch.ones(4, 8)
    Reference(want).numbers(want.clone(), LIMIT)
    assert bool((want == -1).all())


@pytest.mark.parametrize("row", [0, GUARD_ROWS - 1, GUARD_ROWS + 1, GUARD_ROWS + 5, -1])
def test_a_value_beside_the_rows_is_seen_on_the_device(row):
    memory, unused = GuardedRows((5, 24), torch.bfloat16, torch.device("cpu")), torch.tensor([1])
    memory.rows[[0, 2, 3, 4]] = 0.0
    assert not memory.is_written(unused)
    whole = memory.rows.as_strided((5 + 2 * GUARD_ROWS, 24), (24, 1), 0)
    whole[row, 3] = float("nan")
    assert memory.is_written(unused)
    assert memory.why_written(unused) is not None


def test_every_comparison_is_judged_though_an_earlier_one_is_wrong():
    heard = []

    def asked(name, *numbers, wrong=None):
        return Queued(torch.tensor(numbers), lambda values: heard.append((name, values)) or wrong)

    wrong = Failed(FailureKind.WRONG, "first")
    queued = [asked("a", 1.0), asked("b", 2.0, 3.0, wrong=wrong), asked("c", 4.0, wrong=Failed(FailureKind.WRONG, "c"))]
    assert first_wrong(queued) is wrong
    assert heard == [("a", [1.0]), ("b", [2.0, 3.0]), ("c", [4.0])]
    assert verdicts([]) == []
    assert first_wrong([]) is None
