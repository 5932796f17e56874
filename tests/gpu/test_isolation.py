"""On a real GPU: an illegal access, a kernel that never ends and a lack of memory each cost one candidate of a sweep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.plain_memory]

HERE = Path(__file__).parent
TOKENS = [4, 256]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What became of a live sweep among harmful candidates."""
    folder = tmp_path_factory.mktemp("isolation")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parents[1] / "kernels"), str(HERE)]),
        "TRITON_CACHE_DIR": str(folder / "triton-cache"),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "isolation_case.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "CUDA" not in done.stderr  # what is printed in the GPU process stays there
    return json.loads(done.stdout)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("illegal", "launch", "illegal memory access"),
        ("endless", "timeout", "the GPU did not finish within"),
        ("memory", "resources", "out of memory"),
    ],
)
def test_a_harmful_kernel_fails_wherever_it_was_launched(found, fault, kind, words):
    ends = found["failed"][fault]
    assert {tokens for tokens, _, _ in ends} & set(TOKENS)
    for _, ended, reason in ends:
        assert ended == kind
        assert words in reason


def test_all_others_were_timed_and_every_count_has_its_entry(found):
    assert found["counts"] == TOKENS
    assert found["others"] == []
    assert found["measured"] > 2 * 20


def test_a_harmful_plan_between_two_good_ones_fails_alone(found):
    for good, bad, other in found["layers"]:
        assert (good, other) == (6, 6)
        assert "illegal memory access" in bad


def test_the_tuner_itself_never_starts_cuda(found):
    assert found["cuda_here"] is False


def test_the_next_process_finds_a_gpu_that_works(found):
    assert float(torch.ones(1 << 20, device="cuda").sum()) == 1 << 20
