"""Compile C against the headers of the installed nvidia-cuda-cupti, without CUDA's own, and play with the fake built so."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moetune.measure.cupti import library
from moetune.measure.cupti.library import Cupti
from moetune.measure.cupti.ranges import RangeProfiler

# The three names that CUPTI's headers take from cuda.h, and C++'s <string>, of which they take nothing.
CUDA_H = "typedef struct CUctx_st *CUcontext;\ntypedef int CUdevice;\n#define CUPTIAPI\n"
HEADERS = (
    "cupti_result.h",
    "cupti_target.h",
    "cupti_profiler_target.h",
    "cupti_profiler_host.h",
    "cupti_range_profiler.h",
)
INCLUDES = "#include <cuda.h>\n" + "".join(f"#include <{name}>\n" for name in (*HEADERS, "stdio.h", "string.h"))

METRICS = ["gpu__time_duration.sum", "dram__bytes_read.sum", "sm__cycles_active.avg"]
SOURCE = Path(__file__).with_name("fake_cupti.c")


def include_folder():
    """Return where the wheel keeps its headers."""
    path = library.find()
    assert path is not None, "these tests need nvidia-cuda-cupti: `make install`"
    folder = path.resolve().parents[1] / "include"
    assert (folder / HEADERS[0]).is_file(), f"no headers beside {path}"
    return folder


def compile_c(source, folder, *options, name="program"):
    """Compile and return the path of what came of it."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.fail("needs a C compiler, as Triton does: apt-get install gcc")
    (folder / "cuda.h").write_text(CUDA_H)
    (folder / "string").touch()
    code, out = folder / f"{name}.c", folder / name
    code.write_text(INCLUDES + source)
    command = [compiler, "-std=gnu11", "-Wall", "-Werror", f"-I{folder}", f"-I{include_folder()}", str(code)]
    done = subprocess.run([*command, *options, "-o", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


class Fake:
    """The library of fake_cupti.c with its levers."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.fake_notes.restype = ctypes.c_char_p
        self.library.fake_launch.argtypes = [ctypes.c_double]
        size = ctypes.c_size_t
        self.library.fake_rules.argtypes = [ctypes.c_int, size, size, size, ctypes.c_int, ctypes.c_double]
        self.cupti = Cupti(self.library, path)

    def plant(self, function, code, after=0):
        self.library.fake_plant(function.encode(), code, after)

    def rules(self, *, selects=1, passes=1, more=0, lost=0, submitted=1, unit=1.0):
        self.library.fake_rules(selects, passes, more, lost, submitted, unit)

    def launch(self, size=1.0):
        self.library.fake_launch(size)

    def profiler(self, metrics=METRICS):
        return RangeProfiler(self.cupti, self.library, metrics)

    @property
    def notes(self):
        return self.library.fake_notes().decode().split("\n")[:-1]
