"""The wheel that production installs: two packages, the tables, the recordings, and nothing else at top level."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import moetune_kernels

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel once, with the backend that is installed, without any network."""
    pytest.importorskip("hatchling", reason="building the wheel needs hatchling")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def names(wheel) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_top_level_is_exactly_the_two_packages(names):
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"moetune", "moetune_kernels"}


def test_every_table_of_the_checkout_ships(names):
    tables = ROOT / "tuned_configs"
    expected = {f"moetune_kernels/tuned_configs/{path.relative_to(tables)}" for path in tables.rglob("*.json")}
    assert expected <= names
    assert "moetune_kernels/tuned_configs/README.md" in names


def test_every_file_of_the_packages_ships_templates_and_recordings_included(names):
    sources = [*(ROOT / "moetune").rglob("*"), *(ROOT / "kernels" / "moetune_kernels").rglob("*")]
    kept = [path for path in sources if path.is_file() and path.suffix != ".pyc"]
    expected = {str(path.relative_to(ROOT)).removeprefix("kernels/") for path in kept}
    assert expected - names == set()


def test_recordings_stay_under_five_megabytes():
    assert sum(path.stat().st_size for path in (ROOT / "moetune" / "recordings").glob("*.jsonl.xz")) < 5_000_000


def test_metadata_says_version_command_and_dependencies(wheel):
    archive = zipfile.ZipFile(wheel)
    info = f"moetune-{moetune_kernels.__version__}.dist-info"
    metadata = archive.read(f"{info}/METADATA").decode()
    assert f"Version: {moetune_kernels.__version__}\n" in metadata
    assert "moetune = moetune.__main__:main" in archive.read(f"{info}/entry_points.txt").decode()
    for requirement in ("torch>=2.9", "triton>=3.5; platform_system == 'Linux'", "typer", "nvidia-ml-py"):
        assert f"Requires-Dist: {requirement}" in metadata.replace('"', "'")


def test_a_runtime_unpacked_from_the_wheel_finds_its_own_tables(wheel, tmp_path):
    """Production installs the wheel; the tables of a checkout must not be what is found there."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from moetune_kernels.paths import shipped_tables_dir; print(shipped_tables_dir())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == tmp_path / "moetune_kernels" / "tuned_configs"
