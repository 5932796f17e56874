"""``moetune profile``: what it asks for, and the analytical page through the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moetune.cli import main
from moetune.errors import RunError

FIGURES = (
    "time_us",
    "flops_per_byte",
    "bandwidth_gbps",
    "of_nominal",
    "issue_efficiency",
    "tensor_activity",
    "bound_us",
)


@pytest.fixture
def asked(monkeypatch):
    """Replace the profiler with one that notes the request and fails; return the list of requests."""
    requests = []

    def note(request, tell):
        requests.append(request)
        raise RunError("noted")

    monkeypatch.setattr("moetune.profiling.profile", note)
    return requests


def test_the_defaults_are_the_documented_ones(asked):
    from moetune.profiling import PlanChoice

    assert main.run(["profile", "--experts", "64", "--top-k", "2"]) == 1
    (request,) = asked
    assert request.shape.key == "e64_h4096_i14336_k2_bf16"
    assert request.tokens == (1, 64, 4096)
    assert (request.device_index, request.target, request.plan_choice) == (0, None, PlanChoice.BEST)


def test_every_option_reaches_the_profiler(asked):
    from moetune.profiling import PlanChoice

    options = ["--model", "mixtral-8x7b", "--tp", "2", "--tokens", "8,1", "--plan", "default", "--device", "1"]
    main.run(["profile", *options, "--target", "sm_80"])
    main.run(["profile", "--routing", "hot:0.9"])
    assert asked.pop().routing.text == "hot:0.9"
    (request,) = asked
    assert request.shape.key == "e8_h4096_i7168_k2_bf16"
    assert request.tokens == (1, 8)
    assert (request.device_index, request.target, request.plan_choice) == (1, "sm_80", PlanChoice.DEFAULT)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "H100"], "--target must be one of sm_80"),
        (["--plan", "best"], "'best'"),
        (["--json", "."], "is a folder; give a file"),
        (["--experts", "2", "--top-k", "4"], "more than the 2 experts"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_never_reaches_the_profiler(asked, capsys, options, said):
    assert main.run(["profile", *options]) == 2
    printed = capsys.readouterr()
    assert asked == []
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_the_analytical_page_says_so_and_its_json_has_a_source_for_every_figure(no_gpu, quick_compiler, capsys):
    assert main.run(["profile", "--tokens", "1,64", "--target", "sm_90", "--json", "out/profile.json"]) == 0
    printed = capsys.readouterr().out
    assert "NVIDIA H200" in printed
    assert "ANALYTICAL" in printed
    assert max(map(len, printed.splitlines())) <= 80
    page = json.loads(Path("out/profile.json").read_text())
    assert page["measured"] is False
    for tokens in page["tokens"]:
        for kernel in tokens["kernels"]:
            assert [name for name in FIGURES if "source" not in kernel["figures"][name]] == []
    assert [path.name for path in Path("out").iterdir()] == ["profile.json"]


def test_a_json_file_that_cannot_be_written_leaves_no_half_file(no_gpu, quick_compiler, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "profile.json")

    monkeypatch.setattr("pathlib.Path.replace", full)
    assert main.run(["profile", "--tokens", "1", "--target", "sm_90", "--json", "profile.json"]) == 1
    assert "No space left" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_a_page_that_is_computed_knows_no_other_routing(no_gpu, capsys):
    assert main.run(["profile", "--routing", "zipf", "--target", "sm_90"]) == 2
    assert "assumes uniform routing; leave --routing or --target away" in capsys.readouterr().err
    assert main.run(["profile", "--routing", "zipf"]) == 3
    assert "no GPU here" in capsys.readouterr().err
