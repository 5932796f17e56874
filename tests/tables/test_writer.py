"""A written table is whole, is where the runtime looks, and is the same each time."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.tables import table_text, write_table
from moetune.tables import writer as writer_module
from moetune_kernels.config import MoEKernelConfig
from moetune_kernels.device import TARGETS
from moetune_kernels.errors import TableError
from moetune_kernels.lookup import best_plan
from moetune_kernels.table import TunedTable
from moetune_kernels.table_file import read_table


def test_what_is_written_is_what_the_runtime_serves(make_table, tmp_path, monkeypatch):
    table = make_table()
    path = write_table(table, tmp_path)
    assert path == tmp_path / "nvidia_h200" / "e8_h4096_i14336_k2_bf16.json"
    assert read_table(path) == table
    monkeypatch.setenv("MOETUNE_CONFIG_DIR", str(tmp_path))
    resolved = best_plan(table.shape, 16, table.device)
    assert (resolved.plan, resolved.path, resolved.entry_tokens) == (table.entries[16].plan, str(path), 16)


@pytest.mark.parametrize("name", ["NVIDIA H20", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "Odd/Name (R)", ".."])
def test_any_device_name_is_found_again_inside_the_folder(make_table, tmp_path, name):
    device = replace(TARGETS["sm_90"], name=name)
    path = write_table(make_table(device=device), tmp_path)
    assert path.parent.parent == tmp_path
    assert path.resolve().is_relative_to(tmp_path)
    assert read_table(path).device == device


def test_a_replayed_table_is_written_too(make_table, tmp_path):
    assert read_table(write_table(make_table(backend="replay"), tmp_path)).backend == "replay"


def test_equal_tables_are_equal_bytes_in_order(make_table, tmp_path):
    table = make_table()
    backwards = replace(table, entries=dict(reversed(table.entries.items())))
    assert table_text(backwards) == table_text(table)
    document = json.loads(write_table(table, tmp_path).read_text())
    assert list(document) == sorted(document)
    assert list(document["entries"]) == ["1", "2", "4", "8", "16", "1000"]
    assert document["schema_version"] == 1


def test_configs_say_what_people_look_for(make_table, tmp_path):
    document = json.loads(write_table(make_table(), tmp_path).read_text())
    written = document["entries"]["16"]["plan"]["gate_up"]
    assert {"block_size", "warp_size", "smem_size", "prefetch_distance", "max_registers"} <= set(written)
    assert MoEKernelConfig.from_json(written).to_json() == written


def test_a_process_serves_the_new_table_at_once(make_table, tmp_path, monkeypatch):
    monkeypatch.setenv("MOETUNE_CONFIG_DIR", str(tmp_path))
    table = make_table()
    write_table(replace(table, entries={16: table.entries[16]}), tmp_path)
    before = best_plan(table.shape, 1, table.device)
    assert before.path is None or not before.path.startswith(str(tmp_path))
    write_table(table, tmp_path)
    after = best_plan(table.shape, 1, table.device)
    assert after.path is not None
    assert after.path.startswith(str(tmp_path))
    assert after.entry_tokens == 1


def test_an_entry_that_the_runtime_would_drop_is_refused_and_the_old_file_stays(make_table, tmp_path):
    table = make_table()
    before = write_table(table, tmp_path).read_bytes()
    plan = table.entries[16].plan
    broken = replace(table.entries[16], plan=replace(plan, down=replace(plan.down, split_k=2)))
    with pytest.raises(TableError, match="split-K"):
        write_table(replace(table, entries=table.entries | {16: broken}), tmp_path)
    assert [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()] == [before]


def test_a_table_that_the_lookup_does_not_find_is_an_error(make_table, tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module.lookup, "path_in", lambda *args: None)
    with pytest.raises(TableError, match="lookup finds nothing"):
        write_table(make_table(), tmp_path)


def test_a_file_that_changes_as_it_is_written_is_an_error(make_table, tmp_path, monkeypatch):
    def write_more(path, data):
        path.parent.mkdir(parents=True)
        path.write_bytes(data + b"\n")

    monkeypatch.setattr(writer_module, "write_whole", write_more)
    with pytest.raises(TableError, match="holds something else than was written"):
        write_table(make_table(), tmp_path)


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_table_whole_and_nothing_else(make_table, tmp_path, monkeypatch, failing):
    before = write_table(make_table(), tmp_path).read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync", full) if failing == "fsync" else (Path, "replace", full)))
    with pytest.raises(TableError, match=r"cannot write .* \(No space left on device\)"):
        write_table(make_table((1, 2)), tmp_path)
    assert [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()] == [before]


def test_an_interrupt_while_writing_leaves_nothing(make_table, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_table(make_table(), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_is_a_file_is_one_sentence(make_table, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(TableError, match=r"cannot write .*--out"):
        write_table(make_table(), tmp_path / "out")


def test_a_table_with_faults_is_written_without_them(make_table, tmp_path):
    document = make_table().to_json()
    document["entries"]["1000"]["plan"] = None
    partly = TunedTable.parse(json.dumps(document).encode(), "x.json")
    assert partly.faults
    assert list(read_table(write_table(partly, tmp_path)).entries) == [1, 2, 4, 8, 16]
