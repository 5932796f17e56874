"""``moetune doctor``: each problem is found and comes with its fix, and nothing that is broken breaks the doctor."""

from __future__ import annotations

import os
import shlex
import stat
import sysconfig
from types import SimpleNamespace

import pytest

from moetune import doctor
from moetune.cli import main
from moetune.doctor import Finding, State
from moetune.measure.ncu import Blocked
from moetune_kernels.device import TARGETS
from moetune_kernels.errors import TableError

GIB = 1 << 30


def fine(name):
    return lambda: Finding(name, State.FINE, "well")


real_check_gpu = doctor.check_gpu


@pytest.fixture
def healthy(monkeypatch):
    """Make every check of the doctor say that all is well, with a GPU."""
    for check in ("driver", "gpu", "compiler", "cache", "counters", "tables", "recordings"):
        monkeypatch.setattr(doctor, f"check_{check}", fine(check))
    monkeypatch.setattr(doctor, "check_package", lambda name, title: Finding(title, State.FINE, "1.0"))
    monkeypatch.setattr(doctor, "torch_has_gpu", lambda: True)


def test_a_healthy_gpu_machine_can_sweep_live(healthy, capsys):
    assert main.run(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "A sweep can run here, on the GPU."
    assert "Without a GPU" not in printed


def test_a_problem_shows_its_fix_and_stops_a_live_sweep(healthy, monkeypatch, capsys):
    problem = Finding("C compiler", State.PROBLEM, "none found", ("apt-get install gcc",))
    monkeypatch.setattr(doctor, "check_compiler", lambda: problem)
    assert main.run(["doctor"]) == 3
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    where = next(number for number, line in enumerate(lines) if line.startswith("problem"))
    assert lines[where].split() == ["problem", "C", "compiler", "none", "found"]
    assert lines[where + 1].split() == ["fix", "apt-get", "install", "gcc"]
    assert "no sweep can run here" in printed.err


def test_without_a_gpu_the_commands_that_replay_are_named_and_make_it_a_success(healthy, recorded, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "torch_has_gpu", lambda: False)
    monkeypatch.setattr(doctor, "driver_sees_a_gpu", lambda: False)
    monkeypatch.setattr(doctor, "check_gpu", real_check_gpu)
    assert main.run(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    command = " ".join(["moetune sweep", *recorded])
    assert any(line.endswith(f"none here; replay recorded trials with `{command}`") for line in lines)
    assert any(
        line.split("  ")[1:3] == [command, "replays recorded trials (backend replay) into ./moetune-replay/"]
        for line in lines
    )
    assert any(line.startswith("  moetune sweep --target sm_90  ") for line in lines)
    assert lines[-1] == f"A sweep of a recorded layer can run here, on its recorded trials: `{command}`."
    assert main.run([*shlex.split(command)[1:], "--tokens", "1"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(doctor, "check_recordings", lambda: Finding("recordings", State.NOTE, "none"))
    assert main.run(["doctor"]) == 3


def test_a_gpu_that_cannot_be_used_is_not_told_to_replay(healthy, recorded, monkeypatch, capsys):
    problem = Finding("C compiler", State.PROBLEM, "none found", ("apt-get install gcc",))
    monkeypatch.setattr(doctor, "check_compiler", lambda: problem)
    assert main.run(["doctor"]) == 3
    assert "replay" not in capsys.readouterr().out


def test_a_check_that_crashes_is_a_finding(healthy, monkeypatch, capsys):
    def crash():
        raise ZeroDivisionError("deep inside a driver library")

    monkeypatch.setattr(doctor, "check_driver", crash)
    assert main.run(["doctor"]) == 3
    assert "could not be looked at: ZeroDivisionError" in capsys.readouterr().out


def test_this_machine_can_be_examined():
    names = [finding.name for finding in doctor.examine().findings]
    assert {"Python", "torch", "Triton", "driver", "GPU", "C compiler", "Triton cache", "counters", "tables"} <= set(
        names
    )


def test_no_compiler_is_found(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    found = doctor.check_compiler()
    assert found.state is State.PROBLEM
    assert found.fixes == ("apt-get install gcc",)


def test_missing_python_headers_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    found = doctor.check_compiler()
    assert found.state is State.PROBLEM
    assert "Python.h" in found.text
    assert found.fixes[0].endswith("-dev")


def test_a_compiler_that_does_not_compile_is_a_problem(monkeypatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'fatal error: no such luck' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    for compiler, said in ((str(broken), "no such luck"), (str(tmp_path / "none"), "No such file")):
        monkeypatch.setenv("CC", compiler)
        found = doctor.check_compiler()
        assert found.state is State.PROBLEM
        assert said in found.text


def test_a_cache_that_cannot_be_written_or_run_from_is_a_problem(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(blocked / "cache"))
    assert doctor.check_cache().state is State.PROBLEM
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert doctor.check_cache().state is State.FINE
    mount = SimpleNamespace(f_flag=os.ST_NOEXEC, f_bavail=1, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: mount)
    found = doctor.check_cache()
    assert found.state is State.PROBLEM
    assert "noexec" in found.text
    assert "TRITON_CACHE_DIR" in found.fixes[0]


def test_a_missing_package_says_how_to_install_it():
    found = doctor.check_package("no_such_package", "It")
    assert found == Finding("It", State.PROBLEM, "is not installed", ("pip install no_such_package",))


def test_forbidden_counters_are_a_note_with_the_lines_that_allow_them(monkeypatch):
    why = Blocked("only administrators may read counters (RmProfilingAdminOnly is 1)", ("sudo …", "moetune doctor"))
    monkeypatch.setattr("moetune.measure.ncu.blocked", lambda: why)
    found = doctor.check_counters()
    assert found.state is State.NOTE
    assert "RmProfilingAdminOnly" in found.text
    assert found.fixes == ("sudo …",)


@pytest.mark.parametrize(
    ("sm", "free_bytes", "state"),
    [(90, 100 * GIB, State.FINE), (75, 10 * GIB, State.PROBLEM), (90, GIB, State.PROBLEM)],
    ids=["fit", "too-old", "no-memory-left"],
)
def test_the_gpu_itself_is_judged(sm, free_bytes, state):
    from dataclasses import replace

    found = doctor.usable_gpu(replace(TARGETS["sm_90"], sm=sm), free_bytes)
    assert found.state is state
    assert (found.fixes == ()) == (state is State.FINE)


def test_a_driver_with_a_gpu_that_torch_cannot_use_is_explained(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "driver_sees_a_gpu", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in doctor.check_gpu().text
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.check_gpu() == Finding(
        "GPU", State.NOTE, "hidden by CUDA_VISIBLE_DEVICES", ("unset CUDA_VISIBLE_DEVICES",)
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = doctor.check_gpu()
    assert found.state is State.PROBLEM
    assert "13.0" in found.fixes[0]


def test_a_folder_of_tables_that_cannot_be_read_is_not_a_folder_without_tables(monkeypatch, tmp_path):
    def locked(folder):
        raise TableError(f"{folder}: cannot be listed (Permission denied); mend its permissions")

    monkeypatch.setattr("moetune_kernels.paths.search_dirs", lambda: (tmp_path,))
    monkeypatch.setattr("moetune_kernels.table_file.json_files", locked)
    found = doctor.check_tables()
    assert found.state is State.NOTE
    assert "cannot be listed" in found.text
    assert found.fixes == (f"chmod -R u+rX {tmp_path}",)
