"""The tree keeps its form: op folders, kernel files, size budgets, names."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ROOT / "kernels" / "moetune_kernels"
OPS = ("route", "permute", "gate_up", "down", "combine", "fused_moe")
COMPOSED_OPS = ("fused_moe",)  # launch other ops' kernels, and have none of their own

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 40
MAX_KERNEL_LINES = 120
MAX_HOST_PARAMETERS = 6
# The layer's own tensors: users pass them one by one, and a torch custom op takes no dataclass.
LAYER_SIGNATURES = "kernels/moetune_kernels/fused_moe/launch.py"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: str) -> list[Path]:
    """Return the Python files of folders of the project, tests' own data aside."""
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def where(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def names_of_decorators(function: Function) -> list[str]:
    return [ast.unparse(decorator) for decorator in function.decorator_list]


def is_jit(function: Function) -> bool:
    return any(re.match(r"triton\.jit\b", name) for name in names_of_decorators(function))


def is_command(path: Path, function: Function) -> bool:
    """Whether Typer calls this function: its parameters are the command's options."""
    return path.parent == ROOT / "moetune" / "cli" and function.name == path.stem


def is_overload(function: Function) -> bool:
    return any(name.endswith("overload") for name in names_of_decorators(function))


def lines_of_code(function: Function) -> int:
    """Return the lines from ``def`` to the end, the docstring not counted: explaining an argument is no complexity."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring


def kernel_files() -> list[Path]:
    """Return the files that hold a ``@triton.jit`` function."""
    return [path for path in python_files("kernels") if any(is_jit(found) for found in functions(parsed(path)))]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_kernels_is_a_folder_and_never_a_package_that_shadows_another():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_nobody_imports_the_kernels_folder():
    pattern = re.compile(r"^\s*(import|from)\s+kernels\b", re.MULTILINE)
    found = [
        where(path)
        for path in python_files("moetune", "kernels", "tests", "benchmarks")
        if pattern.search(path.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_a_folder_with_launcher_and_reference(op):
    present = {path.name for path in (RUNTIME / op).glob("*.py")}
    assert {"__init__.py", "reference.py"} <= present
    if op not in COMPOSED_OPS:
        assert "launch.py" in present


@pytest.mark.parametrize("op", [op for op in OPS if op not in COMPOSED_OPS])
def test_an_op_has_a_kernel_file(op):
    assert [path for path in kernel_files() if path.parent == RUNTIME / op] != []


def test_kernel_files_hold_only_jit_functions_and_constants():
    """A host function beside a kernel is how launchers and policies creep into kernel files."""
    faults = []
    for path in kernel_files():
        for node in parsed(path).body:
            allowed = isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not (allowed or docstring or (isinstance(node, Function) and is_jit(node))):
                faults.append(f"{where(path)}:{node.lineno}: {type(node).__name__}")
    assert faults == []


def test_kernel_files_import_triton_and_other_kernel_files_only():
    kernels = {str(path.relative_to(RUNTIME.parent).with_suffix("")).replace("/", ".") for path in kernel_files()}
    allowed = {"__future__", "triton", "triton.language", "triton.language.extra.cuda"} | kernels
    faults = []
    for path in kernel_files():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                faults += [f"{where(path)}: {name.name}" for name in node.names if name.name not in allowed]
            elif isinstance(node, ast.ImportFrom) and node.module not in allowed:
                faults.append(f"{where(path)}: {node.module}")
    assert faults == []


def test_no_file_grows_past_its_budget():
    sizes = {
        where(path): len(path.read_text("utf-8").splitlines()) for path in python_files("moetune", "kernels", "tests")
    }
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_no_function_grows_past_its_budget():
    faults = []
    for path in python_files("moetune", "kernels", "tests"):
        for function in functions(parsed(path)):
            lines = lines_of_code(function)
            if lines > (MAX_KERNEL_LINES if is_jit(function) else MAX_FUNCTION_LINES) and not is_command(
                path, function
            ):
                faults.append(f"{where(path)}:{function.lineno} {function.name}: {lines} lines")
    assert faults == []


def test_no_host_function_takes_more_than_six_parameters():
    """Kernels take pointers and sizes, commands take options; everything else bundles values. ``self`` is not counted.

    Options behind a bare ``*`` are counted too: a caller still has to know them.
    """
    faults = []
    for path in python_files("moetune", "kernels"):
        if where(path) == LAYER_SIGNATURES:
            continue
        for function in functions(parsed(path)):
            arguments = function.args
            names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls")])
            if count > MAX_HOST_PARAMETERS and not (
                is_jit(function) or is_command(path, function) or is_overload(function)
            ):
                faults.append(f"{where(path)}:{function.lineno} {function.name}: {count} parameters")
    assert faults == []


def test_no_file_is_named_after_nothing():
    vague = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
    assert [where(path) for path in python_files("moetune", "kernels", "tests") if path.name in vague] == []


def test_tuned_configs_is_data_only():
    suffixes = {path.suffix for path in (ROOT / "tuned_configs").rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".md"}


def test_the_ci_script_can_be_started():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
