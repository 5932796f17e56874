"""Every example of docs/cli.md runs, and the page names every command and option that exists."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from moetune.cli import main
from moetune.cli.options import SWEEP_TOKENS
from moetune.models.catalogue import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text("utf-8")
EXAMPLES = [
    line for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
COMMANDS = ("sweep", "strategies", "profile", "report", "trials", "check", "doctor")


@pytest.fixture
def a_table(documented, capsys):
    """Write the page's space file, and put one tuned table where the user's own live and one where a checkout keeps the shipped ones."""
    from moetune_kernels.paths import user_tables_dir

    (space_file,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    Path("space.json").write_text(space_file, "utf-8")
    assert main.run(["sweep", "--model", "qwen3-30b-a3b", "--tokens", "1,16,256"]) == 0
    table = Path(capsys.readouterr().out.splitlines()[-1].removeprefix("table: "))
    text = table.read_text("utf-8").replace('"backend": "replay"', '"backend": "cuda"')
    for folder in (user_tables_dir(), Path("tuned_configs")):
        target = folder / table.parent.name / table.name
        target.parent.mkdir(parents=True)
        target.write_text(text, "utf-8")
    yield
    shutil.rmtree(user_tables_dir())


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(a_table, quick_compiler, capsys, example):
    program, *arguments = shlex.split(example)
    assert program == "moetune"
    code = main.run(arguments)
    printed = capsys.readouterr()
    # The made-up table is of no kernel files that exist, which is the one fault that `check` has to find.
    wanted = 1 if arguments[0] == "check" else 0
    assert (code, printed.err.count("Traceback")) == (wanted, 0), printed.err
    assert printed.out


def test_every_command_has_an_example():
    assert {shlex.split(example)[1] for example in EXAMPLES} == set(COMMANDS)


def test_the_page_lists_the_catalogue_and_which_of_it_need_a_format():
    words = " ".join(PAGE.split())
    assert f"The catalogue: {', '.join(f'`{name}`' for name in CATALOGUE)}." in words
    quantized = [name for name, model in CATALOGUE.items() if not model.format.is_dense16]
    assert f"The checkpoints of {', '.join(f'`{name}`' for name in quantized)} hold" in words


def test_the_page_gives_the_token_counts_as_they_are_typed():
    assert f"| `--tokens LIST` | `{SWEEP_TOKENS}` |" in PAGE


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_on_the_page(capsys, command):
    main.run([command, "--help"])
    options = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"}
    assert sorted(option for option in options if option not in PAGE) == []
