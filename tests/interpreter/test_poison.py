"""The trap that catches unwritten rows must itself be set."""

from __future__ import annotations

import pytest
import torch

ALLOCATIONS = {
    "empty": lambda dtype: torch.empty(2, 3, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(2, 3, dtype=dtype)),
    "empty_strided": lambda dtype: torch.empty_strided((2, 3), (3, 1), dtype=dtype),
    "new_empty": lambda dtype: torch.zeros(1, dtype=dtype).new_empty(2, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_fresh_float_memory_is_nan(allocate, dtype):
    assert torch.isnan(allocate(dtype)).all()


@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_fresh_integers_are_left_alone(allocate):
    assert allocate(torch.int32).shape == (2, 3)


@pytest.mark.plain_memory
def test_a_marked_test_gets_plain_memory():
    assert torch.empty.__name__ == "empty"
