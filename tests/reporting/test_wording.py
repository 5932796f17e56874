"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest

import pytest

from moetune.reporting import heat_grid, wording


@pytest.mark.parametrize("module", [wording, heat_grid], ids=lambda module: module.__name__)
def test_the_examples_are_true(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
