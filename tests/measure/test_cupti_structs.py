"""Our parameter blocks are those of CUPTI's headers: by a C compiler, and by reading the headers' text."""

from __future__ import annotations

import ctypes
import re
import subprocess

import pytest
from cupti_c import HEADERS, compile_c, include_folder

from moetune.measure.cupti import library, structs

CONSTANTS = {
    "CUPTI_AutoRange": structs.AUTO_RANGE,
    "CUPTI_KernelReplay": structs.KERNEL_REPLAY,
    "CUPTI_PROFILER_TYPE_RANGE_PROFILER": structs.RANGE_PROFILER,
    "CUPTI_METRIC_TYPE__COUNT": structs.METRIC_TYPES,
    "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES": library.INSUFFICIENT_PRIVILEGES,
    "CUPTI_ERROR_NOT_INITIALIZED": 15,
    "CUPTI_ERROR_DISABLED": 23,
    "CUPTI_ERROR_HARDWARE_BUSY": 26,
    "CUPTI_ERROR_NOT_SUPPORTED": 27,
    "CUPTI_ERROR_VIRTUALIZED_DEVICE_NOT_SUPPORTED": 33,
    "CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES": 40,
    "CUPTI_ERROR_CONFIDENTIAL_COMPUTING_NOT_SUPPORTED": 41,
    "CUPTI_ERROR_MIG_DEVICE_NOT_SUPPORTED": 43,
    "CUPTI_ERROR_WSL_DEVICE_NOT_SUPPORTED": 45,
    "CUPTI_ERROR_INVALID_CHIP_NAME": 46,
}
EVERY_STRUCT = pytest.mark.parametrize("kind", structs.ALL, ids=lambda kind: kind.c_type)
SIMPLE = {
    "size_t": ctypes.c_size_t,
    "uint8_t": ctypes.c_uint8,
    "uint16_t": ctypes.c_uint16,
    "uint32_t": ctypes.c_uint32,
    "CUcontext": ctypes.c_void_p,
    "CUpti_ProfilerType": ctypes.c_int,
    "CUpti_MetricType": ctypes.c_int,
    "CUpti_ProfilerRange": ctypes.c_int,
    "CUpti_ProfilerReplayMode": ctypes.c_int,
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What the C compiler says: name -> number."""
    lines = [f'printf("{name} %d\\n", (int){name});' for name in CONSTANTS]
    checks = []
    for kind in structs.ALL:
        lines.append(f'printf("{kind.c_type} %zu\\n", sizeof({kind.c_type}));')
        lines.append(f'printf("{kind.c_type}_STRUCT_SIZE %zu\\n", (size_t){kind.c_type}_STRUCT_SIZE);')
        for name, _ in kind._fields_:
            lines.append(f'printf("{kind.c_type}.{name} %zu\\n", offsetof({kind.c_type}, {name}));')
            size = f"sizeof((({kind.c_type}*)0)->{name})"
            lines.append(f'printf("{kind.c_type}.{name}:size %zu\\n", {size});')
        checks.append(
            f"_Static_assert(__builtin_types_compatible_p(__typeof__(&{kind.function}), "
            f'CUptiResult (*)({kind.c_type}*)), "{kind.function}");'
        )
    program = "\n".join([*checks, "int main(void) {", *lines, "return 0; }"])
    out = compile_c(program, tmp_path_factory.mktemp("layout"))
    printed = subprocess.run([str(out)], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in (line.split() for line in printed.splitlines())}


@EVERY_STRUCT
def test_sizes_offsets_and_the_size_macro_are_the_compilers(measured, kind):
    assert ctypes.sizeof(kind) == measured[kind.c_type]
    assert structs.struct_size(kind) == measured[f"{kind.c_type}_STRUCT_SIZE"]
    for name, _ in kind._fields_:
        field = getattr(kind, name)
        assert (field.offset, field.size) == (
            measured[f"{kind.c_type}.{name}"],
            measured[f"{kind.c_type}.{name}:size"],
        ), name


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_and_error_numbers_are_the_compilers(measured, name):
    assert CONSTANTS[name] == measured[name]


def test_every_error_that_is_explained_is_one_of_those_compared_here():
    assert set(library._MEANINGS) <= set(CONSTANTS.values())


@EVERY_STRUCT
def test_no_field_of_the_headers_text_is_missing(kind):
    """By the names and types that the headers write down, in their order; needs no compiler."""
    text = "\n".join((include_folder() / name).read_text() for name in HEADERS)
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.search(rf"typedef struct {kind.c_type}\s*\{{(?P<body>[^}}]*)\}}", text)
    assert found is not None
    fields = [re.fullmatch(r"(.*?)(\w+)", line.strip(), re.DOTALL) for line in found["body"].split(";")[:-1]]
    read = [(name.group(2), name.group(1).strip()) for name in fields]
    assert [name for name, _ in kind._fields_] == [name for name, _ in read]
    for (name, ours), (_, theirs) in zip(kind._fields_, read, strict=True):
        expected = 8 if "*" in theirs else ctypes.sizeof(SIMPLE[theirs])
        assert ctypes.sizeof(ours) == expected, f"{name} is {theirs}"
