"""How often the host waits while a token count is opened, as CUDA itself sees it."""

from __future__ import annotations

import warnings

import torch

from moetune.measure.inputs import kernel_truth, layer_truth, make_rows, make_weights, other_routings
from moetune.measure.problem import Problem
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=256, inter=128, local_experts=64, top_k=4)
TOKENS = 16


def waits_of(call):
    call()  # what is loaded on first use may wait
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(one.message) for one in caught)


def test_opening_waits_a_few_times_however_many_experts_there_are():
    device = torch.device("cuda")
    assert waits_of(lambda: torch.zeros(3, device=device).tolist()) == 1  # a wait is seen
    weights, rows = make_weights(SHAPE, device, 1), make_rows(SHAPE, TOKENS, device, 2)
    truth = kernel_truth(SHAPE, weights, rows)
    assert waits_of(lambda: kernel_truth(SHAPE, weights, rows)) == 3
    assert waits_of(lambda: layer_truth(SHAPE, weights, rows)) == 2
    assert waits_of(lambda: Problem("timing inputs", SHAPE, weights, truth)) == 2
    assert waits_of(lambda: other_routings(SHAPE, TOKENS, device, seed=3)) == 1
