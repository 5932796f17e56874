"""The documents say what is there: commands, code blocks, links, words."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "kernels").glob("*.md")])
README = (ROOT / "README.md").read_text("utf-8")
COMMANDS = ("sweep", "profile", "report", "trials", "check", "doctor")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def cli():
    """Return a function that runs the command line in this process and gives its result."""
    from typer.testing import CliRunner

    from moetune.cli.main import app

    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def options_of(cli, command: str) -> set[str]:
    """Return the options on a command's help page."""
    return set(re.findall(r"--[a-z][a-z-]+", re.sub(r"\x1b\[[0-9;]*m", "", cli(command, "--help").output)))


def test_the_command_list_is_complete(cli):
    page = cli("--help").output
    assert [command for command in COMMANDS if command not in page] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_help_and_stands_in_the_readme(cli, command):
    result = cli(command, "--help")
    assert result.exit_code == 0
    assert "--help" in result.output
    assert f"`moetune {command}`" in README


def test_commands_in_the_readme_use_options_that_exist(cli):
    faults = []
    for line in "".join(blocks("bash")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] != ["moetune"]:
            continue
        used = {word for word in words[2:] if word.startswith("--")}
        faults += [f"{line}: {option}" for option in sorted(used - options_of(cli, words[1]))]
    assert faults == []


def test_every_environment_variable_stands_in_the_readme():
    sources = [path.read_text("utf-8") for folder in ("moetune", "kernels") for path in (ROOT / folder).rglob("*.py")]
    read = set(re.findall(r"\bMOETUNE_[A-Z_]+\b", "".join(sources)))
    assert {name for name in read if f"`{name}`" not in README} == set()


def test_the_readme_makefile_targets_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    text = README + (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    used = set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))
    assert {name for name in used if not re.search(rf"^{name}:", makefile, re.MULTILINE)} == set()


def test_python_in_the_readme_that_needs_no_gpu_runs(capsys):
    block = next(block for block in blocks("python") if "MoEKernelConfig(" in block)
    exec(compile(block, "README.md", "exec"), {})
    promised = re.findall(r"# (e\d+_.*)$", block, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == promised


def test_the_readme_signatures_are_the_runtime_s():
    import inspect

    from moetune_kernels import fused_moe, fused_moe_forward

    assert list(inspect.signature(fused_moe).parameters)[:5] == ["x", "w13", "w2", "topk_weights", "topk_ids"]
    assert list(inspect.signature(fused_moe_forward).parameters)[:5] == [
        *("hidden_states", "gate_weights", "expert_weights", "top_k", "renormalize"),
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_dependency_has_its_reason():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wanted = [
        *project["project"]["dependencies"],
        *project["dependency-groups"]["lint"],
        *project["dependency-groups"]["test"],
    ]
    reasons = (ROOT / "docs" / "decisions" / "0002-dependencies.md").read_text("utf-8")
    names = [re.split(r"[<>=\[; ]", line)[0] for line in wanted]
    assert [name for name in names if f"`{name}" not in reasons] == []


def test_every_weight_format_role_and_structure_is_in_the_glossary():
    from moetune_kernels.config import Structure
    from moetune_kernels.shape import WeightFormat

    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    words = [member.value for kind in (WeightFormat, Structure) for member in kind]
    assert [word for word in words if not re.search(rf"\b{re.escape(word)}\b", text)] == []


def test_every_field_of_a_table_and_an_entry_is_explained():
    from dataclasses import fields

    from moetune_kernels import Entry, TunedTable

    text = (ROOT / "docs" / "table-format.md").read_text("utf-8")
    names = [
        field.name for kind in (TunedTable, Entry) for field in fields(kind) if field.name not in ("faults", "tokens")
    ]
    assert [name for name in names if not re.search(rf"`[^`]*\b{name}\b[^`]*`", text)] == []
