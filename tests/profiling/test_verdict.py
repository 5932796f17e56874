"""The verdict rules, each on counters made by hand for a case whose answer is known."""

from __future__ import annotations

import pytest

from moetune.measure.parts import Part
from moetune.models.roofline import Limit
from moetune.profiling.page import Kind
from moetune.profiling.verdict import Evidence, judge


def evidence(**changes):
    base = {
        "part": Part.GATE_UP,
        "limit": Limit.MEMORY,
        "bound_us": 100.0,
        "time_us": 200.0,
        "tensor": 0.1,
        "dram": 0.4,
        "issue": 0.1,
        "issue_ceiling": 0.2,
        "waves": 10.0,
        "prefetch": 4,
    }
    return Evidence(**(base | changes))


def test_a_busy_tensor_pipe_is_compute_bound_however_low_the_issue_efficiency():
    verdict = judge(evidence(tensor=0.9, issue=0.12, limit=Limit.COMPUTE))
    assert verdict.kind is Kind.COMPUTE
    assert "90%" in verdict.sentence
    assert "at its roof" in verdict.action


def test_a_busy_tensor_pipe_that_multiplies_padding_is_told_to_use_smaller_tiles():
    verdict = judge(evidence(tensor=0.9, padding=1.6, limit=Limit.COMPUTE))
    assert verdict.kind is Kind.COMPUTE
    assert "block_m" in verdict.action


def test_a_decode_gemm_near_the_memory_roof_is_bandwidth_bound_and_only_smaller_weights_help():
    verdict = judge(evidence(dram=0.93, time_us=107.0))
    assert verdict.kind is Kind.BANDWIDTH
    assert "93%" in verdict.sentence
    assert "smaller weights" in verdict.action


def test_a_bandwidth_bound_kernel_that_reads_twice_is_told_to_read_once():
    verdict = judge(evidence(dram=0.93, byte_ratio=1.8))
    assert verdict.kind is Kind.BANDWIDTH
    assert "1.80 times" in verdict.action
    assert "group_m" in verdict.action


def test_a_copy_that_moves_more_bytes_is_not_told_to_change_tiles_it_does_not_have():
    verdict = judge(evidence(part=Part.COPY, dram=0.93, byte_ratio=1.8, issue_ceiling=None))
    assert verdict.kind is Kind.BANDWIDTH
    assert "group_m" not in verdict.action


def test_code_with_more_instructions_than_the_bound_has_slots_for_is_issue_bound():
    verdict = judge(evidence(issue_ceiling=1.4, issue=0.7))
    assert verdict.kind is Kind.ISSUE
    assert "1.4 times" in verdict.sentence


def test_full_issue_slots_are_issue_bound():
    assert judge(evidence(issue=0.8)).kind is Kind.ISSUE


def test_a_short_router_is_launch_bound_not_a_tuning_problem():
    verdict = judge(evidence(part=Part.ROUTING, time_us=4.0, bound_us=0.1, dram=0.01, tensor=None, issue_ceiling=None))
    assert verdict.kind is Kind.LAUNCH
    assert "4.0 us" in verdict.sentence


def test_a_short_gemm_is_not_excused_as_a_launch():
    assert judge(evidence(time_us=8.0, bound_us=2.0)).kind is Kind.LATENCY


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"spills": 120}, "120 registers spill"),
        ({"waves": 0.32}, "32% of the device's places"),
        ({"limit": Limit.COMPUTE, "padding": 2.0}, "2.0 rows are multiplied"),
        ({"conflicts": 0.3}, "bank conflicts cost 30%"),
        ({"byte_ratio": 1.5}, "1.50 times the least bytes"),
        ({"waves": 1.2}, "1.2 waves"),
        ({"prefetch": 3}, "prefetch_distance 4"),
        ({"occupancy": 0.06}, "6% of the warps"),
        ({}, "moetune sweep"),
    ],
    ids=["spills", "few-tiles", "padding", "conflicts", "rereads", "last-wave", "shallow", "sparse", "nothing-left"],
)
def test_nothing_busy_is_latency_and_the_first_cause_found_is_the_advice(changes, says):
    verdict = judge(evidence(**changes))
    assert verdict.kind is Kind.LATENCY
    assert "2.0 times its bound" in verdict.sentence
    assert says in verdict.action


def test_padding_of_a_memory_bound_tile_is_free_and_not_blamed():
    assert "rows are multiplied" not in judge(evidence(padding=16.0)).action


def test_an_estimate_is_called_one():
    assert "estimated" in judge(evidence(dram=0.9, estimated=True)).sentence
    assert "estimated" not in judge(evidence(dram=0.9)).sentence


def test_what_did_not_run_has_a_bound_but_no_time():
    verdict = judge(Evidence(part=Part.DOWN, limit=Limit.MEMORY, bound_us=48.9, waves=0.3))
    assert verdict.kind is Kind.UNTIMED
    assert "48.9 us" in verdict.sentence
    assert "block_n" in verdict.action


def test_a_bound_of_nothing_does_not_divide_by_zero():
    assert judge(evidence(bound_us=0.0)).kind is Kind.LATENCY
