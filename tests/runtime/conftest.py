"""Tables made up for the tests, folders of tables that no user and no release put there, and a clean lookup."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from moetune_kernels import lookup, paths
from moetune_kernels.device import TARGETS, DeviceInfo
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.kernel_hash import source_sha256
from moetune_kernels.shape import MoEShape
from moetune_kernels.table import Entry, TunedTable, serve_ranges
from moetune_kernels.table_file import table_path

SHAPE = MoEShape(hidden=512, inter=256, local_experts=8, top_k=2)


@pytest.fixture
def shape() -> MoEShape:
    return SHAPE


@pytest.fixture
def h200() -> DeviceInfo:
    return TARGETS["sm_90"]


@pytest.fixture
def make_table():
    """Return a maker of sound tables; every plan has prefetch 2 in gate-up, which no default plan has."""

    def make(tokens=(8, 16, 24), *, shape=SHAPE, device=TARGETS["sm_90"], backend="cuda") -> TunedTable:
        plan = heuristic_plan(shape, 16, device)
        plan = replace(plan, gate_up=replace(plan.gate_up, prefetch_distance=2))
        figure = {"value": 1.5, "source": "analytical"}
        entries = {
            count: Entry(
                tokens=count, serves=serves, plan=plan, median_us=90.0, spread_us=1.0, baseline_us=100.0, bound_us=50.0,
                flops_per_byte=figure, bandwidth_gbps=figure, issue_efficiency=figure,
            )
            for count, serves in serve_ranges(tokens).items()
        }  # fmt: skip
        return TunedTable(
            backend=backend, device=device, shape=shape, ceilings={"bytes_per_s": 4e12, "flops": 7e14},
            kernels={"version": "0.1.0", "source_sha256": source_sha256([plan])}, triton="3.6.0", torch="2.11.0",
            driver="580.1", measured_at="2026-12-01T00:00:00Z", command="moetune sweep", entries=entries,
        )  # fmt: skip

    return make


@pytest.fixture
def put():
    """Return a function that writes a table, changed or not, into a folder and returns its path."""

    def write(folder: Path, table: TunedTable, change=lambda document: None) -> Path:
        document = table.to_json()
        change(document)
        path = table_path(folder, table.device, table.shape)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document))
        return path

    return write


@pytest.fixture
def folders(tmp_path, monkeypatch) -> dict[str, Path]:
    """Return empty folders in the place of MOETUNE_CONFIG_DIR, the user's and the shipped one."""
    made = {"config": tmp_path / "config", "user": tmp_path / "data/moetune/tables", "shipped": tmp_path / "shipped"}
    for folder in made.values():
        folder.mkdir(parents=True)
    monkeypatch.setenv("MOETUNE_CONFIG_DIR", str(made["config"]))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(paths, "shipped_tables_dir", lambda: made["shipped"])
    lookup.reload()
    return made


@pytest.fixture(autouse=True)
def _fresh_lookup():
    logger = logging.getLogger("moetune")
    before = (logger.level, list(logger.handlers), logger.propagate)
    lookup.reload()
    yield
    logger.level, logger.handlers[:], logger.propagate = before
    lookup.reload()


@pytest.fixture
def warnings(caplog):
    """Return a function that lists what was warned so far."""
    caplog.set_level(logging.DEBUG, logger="moetune")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
