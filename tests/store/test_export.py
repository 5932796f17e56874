"""Trials as files for other tools: every field in a column, whole or not at all."""

from __future__ import annotations

import csv
import json
from dataclasses import fields, replace

import pytest

from moetune.errors import MissingError, RunError, UsageError
from moetune.outcome import Compiled
from moetune.store import Store, TrialFilter, export
from moetune.store.export import check_export, export_trials
from moetune.store.flat import COLUMNS, flat
from moetune_kernels.config import MoEKernelConfig
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import MoEShape
from tests.store.test_store import COMPILED, MEASURED, PLAN, SHAPE, TRIALS, fill, provenance


@pytest.fixture
def listed(tmp_path):
    fill(tmp_path / "trials.sqlite", provenance())
    with Store.to_read(tmp_path / "trials.sqlite") as store:
        return list(store.newest(TrialFilter()))[::-1]


def test_every_field_has_a_column():
    compiled, config = ({field.name for field in fields(kind)} for kind in (Compiled, MoEKernelConfig))
    columns = set(COLUMNS)
    assert compiled | config <= columns
    assert {f"{role}_{name}" for role in ("gate_up", "down") for name in config} <= columns
    assert {field.name for field in fields(MoEShape)} <= columns
    assert {field.name for field in fields(DeviceInfo)} - {"name"} <= columns
    for name in ("bandwidth_gbps", "flops_per_byte", "issue_efficiency"):
        assert {name, f"{name}_source"} <= columns


def test_a_row_holds_all_that_a_trial_says(listed):
    gate_up, failed, routing, layer = map(flat, listed)
    assert list(gate_up) == list(failed) == list(COLUMNS)
    assert (gate_up["subject"], gate_up["tokens"], gate_up["median_us"]) == ("gate_up", 16, MEASURED.median_us)
    assert (gate_up["bandwidth_gbps"], gate_up["bandwidth_gbps_source"]) == (4100.0, "counter")
    assert (gate_up["issue_efficiency"], gate_up["issue_efficiency_source"]) == (None, "unavailable")
    assert (gate_up["structure"], gate_up["block_n"], gate_up["max_registers"]) == ("tma", 128, 168)
    assert (gate_up["registers"], gate_up["spills"], gate_up["smem_bytes"]) == (168, 0, COMPILED.smem_bytes)
    assert (gate_up["shape"], gate_up["experts"], gate_up["device"]) == (SHAPE.key, 8, "NVIDIA H200")
    assert (gate_up["triton"], gate_up["driver"], gate_up["bound_us"]) == ("3.6.0", "580.1", 100.5)
    assert (gate_up["ceiling_flops"], gate_up["command"]) == (7.8e14, "moetune sweep --model tiny")
    assert (failed["failure"], failed["reason"]) == ("compile", "PassManager::run failed")
    assert (failed["tokens"], failed["median_us"], failed["verified"]) == (None, None, False)
    assert (routing["block_m"], routing["structure"]) == (64, None)
    assert (layer["block_m"], layer["gate_up_block_n"], layer["down_block_n"]) == (64, 128, PLAN.down.block_n)
    assert (layer["structure"], layer["plan_combine"], layer["verified"]) == (None, "gather_sum", True)


def test_the_routing_that_trials_were_timed_under_is_a_column(tmp_path):
    fill(tmp_path / "trials.sqlite", replace(provenance(), routing="zipf:1.1"))
    fill(tmp_path / "trials.sqlite", provenance())
    with Store.to_read(tmp_path / "trials.sqlite") as store:
        found = [flat(one)["routing"] for one in store.newest(TrialFilter())]
    assert found == [*["uniform"] * len(TRIALS), *["zipf:1.1"] * len(TRIALS)]


def test_columns_hold_what_they_are_declared_to_hold(listed):
    for row in map(flat, listed):
        assert [name for name, value in row.items() if value is not None and type(value) is not COLUMNS[name]] == []


def test_json_lines_come_back_as_they_went_out(listed, tmp_path):
    path = tmp_path / "deep" / "trials.jsonl"
    assert export_trials(listed, path) == len(TRIALS)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [flat(one) for one in listed]


def test_csv_has_a_header_and_empty_cells_for_what_is_not_known(listed, tmp_path):
    path = tmp_path / "trials.csv"
    assert export_trials(listed, path) == len(TRIALS)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    for row, one in zip(rows, listed, strict=True):
        for name, value in flat(one).items():
            assert row[name] == ("" if value is None else str(value).lower() if COLUMNS[name] is bool else str(value))


@pytest.mark.parametrize("name", ["none.csv", "none.jsonl"])
def test_no_trials_make_a_file_without_rows(tmp_path, name):
    assert export_trials([], tmp_path / name) == 0
    assert (tmp_path / name).read_text().count("\n") == (1 if name.endswith("csv") else 0)


def test_parquet_keeps_types_also_of_empty_columns(listed, tmp_path):
    pytest.importorskip("pyarrow", reason="a .parquet file needs pyarrow")
    import pandas as pd

    path = tmp_path / "trials.parquet"
    assert export_trials(listed, path) == len(TRIALS)
    frame = pd.read_parquet(path, dtype_backend="numpy_nullable")
    assert list(frame.columns) == list(COLUMNS)
    assert frame["tokens"].dtype == "Int64"
    assert frame["median_us"].dtype == "Float64"
    assert frame["verified"].dtype == "boolean"
    for name in COLUMNS:
        found = [None if pd.isna(value) else value for value in frame[name]]
        assert found == [flat(one)[name] for one in listed], name
    assert export_trials([], path) == 0
    assert list(pd.read_parquet(path).columns) == list(COLUMNS)


def test_parquet_without_pyarrow_is_one_sentence_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match=r"needs pyarrow.*pip install 'moetune\[parquet\]'.*\.csv or \.jsonl"):
        check_export(tmp_path / "trials.parquet")
    assert check_export(tmp_path / "trials.csv").suffix == ".csv"


@pytest.mark.parametrize("name", ["trials", "trials.json", "trials.csv.gz", "trials.PARQUET"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(UsageError, match=r"ends in \.csv, \.parquet, \.jsonl"):
        check_export(tmp_path / name)


@pytest.mark.parametrize("name", ["trials.csv", "trials.jsonl"])
def test_an_export_that_fails_in_the_middle_leaves_the_old_file(listed, tmp_path, name):
    path = tmp_path / name
    export_trials(listed, path)
    before = path.read_bytes(), sorted(tmp_path.iterdir())

    def breaks():
        yield listed[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_trials(breaks(), path)
    assert (path.read_bytes(), sorted(tmp_path.iterdir())) == before


def test_a_place_that_cannot_be_written_is_one_sentence(listed, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="cannot write"):
        export_trials(listed, tmp_path / "file" / "trials.csv")


def test_text_that_is_no_text_is_written_out(listed, tmp_path):
    odd = replace(listed[0], run=replace(listed[0].run, command="moetune \udcff\n,\"'"))
    for name in ("odd.csv", "odd.jsonl"):
        assert export_trials([odd], tmp_path / name) == 1
        assert (tmp_path / name).read_bytes().decode("utf-8")
