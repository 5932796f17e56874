"""Every warning of the runtime is a fault here, and so is what only costs speed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.tables import check_path, write_table
from moetune_kernels.shape import MoEShape

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@pytest.fixture
def written(make_table, tmp_path):
    """Return the path of a sound table, full ladder."""
    return write_table(make_table(LADDER), tmp_path)


def change(path: Path, edit) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def test_a_sound_table_has_no_faults_alone_or_in_its_folder(written, tmp_path):
    assert check_path(written) == []
    assert check_path(tmp_path) == []
    assert check_path(written.parent) == []


FAULTS = {
    "gap": (lambda d: [d["entries"].pop(k) for k in ("24", "32", "48", "64")], "gap between entries 16 and 96"),
    "hole": (lambda d: d["entries"]["24"].update(serves=[22, 27]), "no entry serves 20 to 21 tokens"),
    "overlap": (lambda d: d["entries"]["24"].update(serves=[18, 27]), "entries 16 and 24 both serve 18 tokens"),
    "reach": (lambda d: d["entries"]["16384"].update(serves=[11586, 131072]), "the last serves up to 32768"),
    "below": (lambda d: d["entries"].pop("1"), None),
    "slow": (lambda d: d["entries"]["8"].update(median_us=120), "entry 8 takes 120 us, the default plan 100 us"),
    "kernels": (lambda d: d["kernels"].update(source_sha256="0" * 64), "run again: moetune sweep --model mixtral-8x7b"),
    "unmeasured": (lambda d: d.update(backend="replay"), "backend is replay"),
    "entry": (lambda d: d["entries"]["8"]["plan"]["down"].update(block_n=48), "block_n must be one of"),
    "unknown": (lambda d: d.update(weather=1), "unknown fields: weather"),
    "misplaced": (lambda d: d["shape"].update(top_k=4), "its content says nvidia_h200/e8_h4096_i14336_k4_bf16.json"),
    "wrong device": (lambda d: d["device"].update(name="NVIDIA H20"), "its content says nvidia_h20/"),
    "schema": (lambda d: d.update(schema_version=2), "schema_version must be 1"),
}


@pytest.mark.parametrize(("edit", "says"), FAULTS.values(), ids=FAULTS)
def test_each_fault_is_a_sentence_with_the_file(written, edit, says):
    change(written, edit)
    faults = check_path(written)
    # Without its first entry a ladder starts later: no fault, the default plan serves below.
    expected = [] if says is None else [says]
    assert [any(text in fault for fault in faults) for text in expected] == [True] * len(expected)
    assert all(fault.startswith(str(written)) for fault in faults)


def test_faults_are_listed_each_and_not_only_the_first(written):
    def damage(document):
        for key in ("1", "8", "64"):
            document["entries"][key]["median_us"] = float("nan")
        document["entries"]["-4"] = {}

    change(written, damage)
    dropped = [fault for fault in check_path(written) if "entry '" in fault]
    assert len(dropped) == 4


def test_a_slow_entry_within_noise_is_no_fault(written):
    change(written, lambda document: document["entries"]["8"].update(median_us=100.5))
    assert check_path(written) == []


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[]", b"[" * 50_000], ids=["empty", "{", "utf8", "[]", "deep"]
)
def test_a_file_that_is_no_table_is_one_fault(written, tmp_path, content):
    written.write_bytes(content)
    assert len(check_path(written)) == 1
    assert len(check_path(tmp_path)) == 1


@pytest.mark.timeout(20)
def test_pipes_folders_and_huge_files_named_like_tables_are_faults(written, tmp_path):
    (written.parent / "folder.json").mkdir()
    os.mkfifo(written.parent / "pipe.json")
    (written.parent / "huge.json").touch()
    os.truncate(written.parent / "huge.json", 100 << 20)
    faults = check_path(tmp_path)
    assert len(faults) == 3
    assert "a folder" in faults[0]
    assert "104,857,600 B" in faults[1]
    assert "not a regular file" in faults[2]


def test_two_files_for_one_layer_are_a_fault(written, tmp_path):
    (written.parent / "copy.json").write_bytes(written.read_bytes())
    faults = check_path(tmp_path)
    assert any("same device and shape" in fault for fault in faults)
    assert any("rename the file" in fault for fault in faults)


def test_a_folder_of_good_and_bad_tables_lists_only_the_bad_one(make_table, written, tmp_path):
    other = write_table(make_table(LADDER, shape=MoEShape(hidden=64, inter=64, local_experts=4, top_k=1)), tmp_path)
    change(other, lambda document: document["entries"]["8"].update(median_us=120))
    faults = check_path(tmp_path)
    assert len(faults) == 1
    assert faults[0].startswith(str(other))


def test_an_unmeasured_table_is_sound_where_it_is_allowed(make_table, tmp_path, monkeypatch):
    path = write_table(make_table(LADDER, backend="replay"), tmp_path)
    assert "MOETUNE_ALLOW_UNMEASURED" in check_path(path)[0]
    monkeypatch.setenv("MOETUNE_ALLOW_UNMEASURED", "1")
    assert check_path(path) == []


def test_nothing_to_check_is_said(tmp_path):
    assert "no such file" in check_path(tmp_path / "absent")[0]
    assert "holds no tables" in check_path(tmp_path)[0]


def test_a_relative_path_is_placed_like_an_absolute_one(written, tmp_path, monkeypatch):
    monkeypatch.chdir(written.parent)
    assert check_path(Path(written.name)) == []
    monkeypatch.chdir(tmp_path)
    assert check_path(Path()) == []
    assert check_path(Path("nvidia_h200/../nvidia_h200")) == []


def test_entries_without_a_baseline_are_not_called_slow(make_table, tmp_path):
    table = make_table(LADDER)
    entries = {tokens: replace(entry, baseline_us=None) for tokens, entry in table.entries.items()}
    assert check_path(write_table(replace(table, entries=entries), tmp_path)) == []


@pytest.mark.parametrize("routing", ["uniform", "zipf:1.1", "hot:0.5", "trace:0123456789abcdef"])
def test_a_known_routing_is_no_fault(make_table, tmp_path, routing):
    path = write_table(replace(make_table(), routing=routing), tmp_path)
    assert not any("this moetune knows" in fault for fault in check_path(path))


@pytest.mark.parametrize(
    "routing", ["", "zipf", "zipf:x", "zipf:1.10", "hot:2", "trace:xyz", "trace.npz", "lognormal:1"]
)
def test_a_routing_that_nobody_can_ask_for_is_a_fault(make_table, tmp_path, routing):
    path = write_table(replace(make_table(), routing=routing), tmp_path)
    assert any("none that this moetune knows" in fault for fault in check_path(path))
