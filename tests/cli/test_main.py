"""The command line as a whole: exit codes, streams, one sentence per error, and a fast start."""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from moetune.cli import main
from moetune.cli.output import out
from moetune.errors import MissingError, RunError, ShapeError, TableError, UnsupportedDeviceError, UsageError

COMMANDS = ("sweep", "profile", "report", "trials", "check", "doctor")


# A started Python finds the packages where this one found them.
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def fail_with(monkeypatch, error):
    """Make ``moetune check`` raise ``error``."""

    def fail(*_):
        raise error

    monkeypatch.setattr("moetune.cli.check.default_dirs", fail)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunError("no candidate passed"), 1),
        (UsageError("bad flag"), 2),
        (ShapeError("bad size"), 2),
        (TableError("the lookup would not find it"), 1),
        (MissingError("no GPU"), 3),
        (UnsupportedDeviceError("no CUDA device 7"), 3),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 3),
        (OSError(28, "No space left on device", "/x/table.json"), 1),
        (ZeroDivisionError("division by zero"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_every_error_is_one_line_on_stderr_with_its_exit_code(monkeypatch, capsys, error, code):
    fail_with(monkeypatch, error)
    assert main.run(["check"]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err


def test_an_unknown_error_says_how_to_see_where(monkeypatch, capsys):
    fail_with(monkeypatch, KeyError("block_m"))
    main.run(["check"])
    assert "internal error" in capsys.readouterr().err
    monkeypatch.setenv("MOETUNE_TRACEBACK", "1")
    main.run(["check"])
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "default_dirs" in printed


def test_a_message_cannot_steer_the_terminal(monkeypatch, capsys):
    fail_with(monkeypatch, UsageError("bad \x1b[2J\x07 name\nsecond line"))
    main.run(["check"])
    assert capsys.readouterr().err == "error: bad \\x1b[2J\\x07 name second line\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["sweep", "--nope"],
        ["sweep", "--tp", "two"],
        ["sweep", "--device", "-1"],
        ["sweep", "--device", "0,,1"],
        ["sweep", "--device", "all,1"],
        ["sweep", "--device", "9999"],
        ["sweep", "--format", "fp7"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_one_line_with_the_help_page_to_read(capsys, arguments):
    assert main.run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "--help`" in printed.err


@pytest.mark.parametrize("arguments", [["--tp", "two"], ["--tp=two"], ["--tp", "1", "--tp", "two"]], ids=" ".join)
def test_a_value_that_cannot_be_read_is_shown(capsys, arguments):
    assert main.run(["sweep", *arguments]) == 2
    assert ", got 'two'; see `moetune sweep --help`" in capsys.readouterr().err


def test_an_option_without_its_value_names_the_right_help_page(capsys):
    assert main.run(["sweep", "--tokens"]) == 2
    assert capsys.readouterr().err == "error: Option '--tokens' requires an argument; see `moetune sweep --help`\n"


def test_no_command_shows_the_help_page_and_is_bad_usage(capsys):
    assert main.run([]) == 2
    page = capsys.readouterr().out
    assert [command for command in COMMANDS if command not in page] == []


def test_version(capsys):
    from moetune_kernels import __version__

    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"moetune {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_page_has_an_example(capsys, command):
    assert main.run([command, "--help"]) == 0
    assert f"Example: moetune {command}" in capsys.readouterr().out


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_another_platform_gets_one_sentence_at_start(monkeypatch, capsys, platform):
    monkeypatch.setattr(sys, "platform", platform)
    assert main.run(["--help"]) == 3
    assert "moetune runs on Linux only" in capsys.readouterr().err


def test_ctrl_c_exits_with_130_and_says_that_trials_are_kept(monkeypatch, capsys):
    fail_with(monkeypatch, KeyboardInterrupt())
    assert main.run(["check"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("moetune.tuning.sweep", interrupted)
    assert main.run(["sweep"]) == 130
    assert "the same command continues" in capsys.readouterr().err


def test_help_loads_nothing_heavy_and_takes_under_a_second():
    program = (
        "import sys; from moetune.cli.main import run; run(['--help']); run(['sweep', '--help']); "
        "print([m for m in ('torch', 'triton', 'numpy', 'pandas', 'matplotlib', 'pynvml', 'sqlite3') if m in sys.modules])"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, env=ENVIRONMENT
    )  # write the .pyc files
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.stdout.splitlines()[-1] == "[]"
    assert time.monotonic() - started < 1.0


def test_a_closed_pipe_ends_without_a_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "moetune", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
        env=ENVIRONMENT,
    )
    os.close(writing)
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


@pytest.mark.parametrize("closed", ["<&- >&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_end_as_open_ones_do(tmp_path, closed):
    for arguments, code in (("check", 0), ("check nope", 2)):
        command = f"exec {shlex.quote(sys.executable)} -m moetune {arguments} {closed}"
        done = subprocess.run(["sh", "-c", command], check=False, env=ENVIRONMENT, cwd=tmp_path, capture_output=True)
        assert (done.returncode, b"Traceback" in done.stdout + done.stderr) == (code, False)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_of_progress_that_leaves_does_not_stop_the_work(monkeypatch, capsys):
    class Gone(io.StringIO):
        def write(self, *_):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    out.progress("working")
    out.result("done")
    assert capsys.readouterr().out == "done\n"


def test_ctrl_c_while_the_program_loads_is_no_traceback(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}
    done = subprocess.run([sys.executable, "-m", "moetune"], capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (130, b"")


def test_a_folder_that_is_gone_is_one_sentence(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main.run(["report"]) == 1
    assert "the current folder is gone" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_unwinds_as_ctrl_c_does(number):
    program = (
        "import time, moetune.cli.check as c\n"
        "def wait(*_):\n"
        "    try:\n        print('waiting', flush=True); time.sleep(60)\n"
        "    finally:\n        print('unwound', flush=True)\n"
        "c.default_dirs = wait\n"
        "import sys; sys.argv = ['moetune', 'check']\n"
        "from moetune.cli.main import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        assert process.stdout.read() == "unwound\n"
    assert process.returncode == 128 + number


def test_a_python_without_the_dependencies_gets_one_sentence(tmp_path):
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}
    command = [sys.executable, "-m", "moetune", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 3
    assert done.stderr.startswith("error: typer is not installed")
    assert done.stderr.count("\n") == 1
