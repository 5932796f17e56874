"""From a call to its plan: right table, right entry, never an exception, never slow."""

from __future__ import annotations

import doctest
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moetune_kernels import lookup, table_file
from moetune_kernels.device import TARGETS
from moetune_kernels.errors import ShapeError
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.lookup import best_plan, find_table, reload
from moetune_kernels.shape import MoEShape, WeightFormat
from moetune_kernels.table import MAX_TABLE_BYTES
from moetune_kernels.table_file import table_path

H200 = TARGETS["sm_90"]
H100 = replace(H200, name="NVIDIA H100 80GB HBM3", memory_bytes=84_942_979_072, l2_bytes=52_428_800)
NAMES = (
    "NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H20", "NVIDIA H20-3e", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe",
    "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "Odd/Name (R)",
)  # fmt: skip


def test_the_named_folder_beats_the_users_beats_the_shipped(folders, put, make_table, shape, h200):
    for name in ("shipped", "user", "config"):
        path = put(folders[name], make_table())
        reload()
        resolved = best_plan(shape, 16, h200)
        assert (resolved.source, resolved.path, resolved.entry_tokens) == ("table", str(path), 16)
        assert resolved.plan == make_table().entries[16].plan
        assert find_table(shape, h200) == (make_table(), str(path))


def test_a_sweep_of_one_count_does_not_hide_the_shipped_table(folders, put, make_table, shape, h200):
    user, shipped = put(folders["user"], make_table((64,))), put(folders["shipped"], make_table((8, 16, 32, 64, 128)))
    served = {tokens: best_plan(shape, tokens, h200).path for tokens in (16, 64, 100, 200)}
    assert served == {16: str(shipped), 64: str(user), 100: str(user), 200: str(shipped)}


def test_without_a_table_the_default_plan_serves_and_says_so(folders, shape, h200, warnings):
    resolved = best_plan(shape, 16, h200)
    assert resolved.plan == heuristic_plan(shape, 16, h200)
    assert (resolved.source, resolved.path, resolved.entry_tokens) == ("heuristic", None, None)
    assert find_table(shape, h200) is None
    assert warnings() == []


def test_the_example_of_the_lookup_is_what_it_answers(folders):
    found = doctest.DocTestFinder(recurse=False).find(best_plan, "best_plan", globs=dict(vars(lookup)))
    assert doctest.DocTestRunner().run(found[0]).failed == 0


def test_beyond_the_ladder_the_default_plan_serves(folders, put, make_table, shape, h200):
    put(folders["user"], make_table((1, 2, 4, 8)))
    sources = {tokens: best_plan(shape, tokens, h200).source for tokens in (0, 1, 9, 16, 17, 64, 2048, 16384)}
    assert sources == {
        0: "heuristic", 1: "table", 9: "table", 16: "table", 17: "heuristic", 64: "heuristic", 2048: "heuristic", 16384: "heuristic",
    }  # fmt: skip
    assert "twice 8 tokens" in best_plan(shape, 64, h200).why


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_is_found_under_every_device_name(folders, put, make_table, shape, name):
    device = replace(H200, name=name)
    put(folders["user"], make_table(device=device))
    assert best_plan(shape, 16, device).source == "table"
    others = [best_plan(shape, 16, replace(H200, name=other)).source for other in NAMES if other != name]
    assert "table" not in others


def test_a_slice_never_reads_the_whole_cards_table(folders, put, make_table, shape, h200):
    put(folders["user"], make_table())
    for change in ({"mig": "3g.71gb"}, {"sm_count": 60}, {"memory_bytes": h200.memory_bytes // 2}):
        assert best_plan(shape, 16, replace(h200, **change)).source == "heuristic"


@pytest.mark.parametrize(("measured", "here"), [(H100, H200), (H200, H100)], ids=["h100-for-h200", "h200-for-h100"])
def test_a_relative_stands_in_with_one_warning_and_never_before_the_own_table(
    folders, put, make_table, shape, warnings, measured, here
):
    put(folders["config"], make_table(device=measured))
    assert [best_plan(shape, tokens, here).source for tokens in (8, 16, 24)] == ["relative"] * 3
    assert len(warnings()) == 1
    assert measured.name in warnings()[0]
    put(folders["shipped"], make_table(device=here))
    reload()
    assert best_plan(shape, 16, here).source == "table"


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 7168},
        {"inter": 128},
        {"local_experts": 16},
        {"top_k": 4},
        {"format": WeightFormat.FP16},
    ],
    ids=str,
)
def test_no_table_serves_another_layer(folders, put, make_table, shape, h200, change):
    put(folders["user"], make_table())
    assert best_plan(shape, 16, h200).source == "table"
    assert best_plan(replace(shape, **change), 16, h200).source == "heuristic"


def test_a_renamed_file_still_serves_by_its_content(folders, make_table, put, shape, h200):
    path = put(folders["user"], make_table())
    moved = path.rename(folders["config"] / "from a colleague.json")
    assert best_plan(shape, 16, h200).path == str(moved)


def test_content_that_disagrees_with_its_path_serves_what_it_says(folders, make_table, shape, h200, put):
    path = put(folders["user"], make_table(shape=replace(shape, top_k=4)))
    path.rename(table_path(folders["user"], h200, shape))
    assert best_plan(shape, 16, h200).source == "heuristic"
    assert best_plan(replace(shape, top_k=4), 16, h200).source == "table"


def test_unmeasured_tables_are_ignored_unless_allowed(folders, put, make_table, shape, h200, monkeypatch):
    put(folders["config"], make_table(backend="replay"))
    assert best_plan(shape, 16, h200).source == "heuristic"
    monkeypatch.setenv("MOETUNE_ALLOW_UNMEASURED", "1")
    reload()
    assert best_plan(shape, 16, h200).source == "table"


def damaged(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def sparse(path: Path) -> None:
    damaged(path, b"")
    os.truncate(path, 100 << 20)


def folder_of_that_name(path: Path) -> None:
    path.mkdir(parents=True)


def named_pipe(path: Path) -> None:
    path.parent.mkdir(parents=True)
    os.mkfifo(path)


def link_to_itself(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to(path)


DAMAGE = {
    "empty": lambda path: damaged(path, b""),
    "truncated": lambda path: damaged(path, b'{"1": {"BLOCK_SIZE_M": 16,'),
    "bad UTF-8": lambda path: damaged(path, b"\xff\xfe\xfa"),
    "a list": lambda path: damaged(path, b"[]"),
    "deeply nested": lambda path: damaged(path, b"[" * 100_000),
    "100 MB": sparse,
    "a folder": folder_of_that_name,
    "a named pipe": named_pipe,
    "a link to itself": link_to_itself,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_one_warning_and_the_next_table_serves(
    folders, put, make_table, shape, h200, warnings, damage
):
    path = table_path(folders["config"], h200, shape)
    damage(path)
    shipped = put(folders["shipped"], make_table())
    assert [best_plan(shape, tokens, h200).path for tokens in (8, 16, 24)] == [str(shipped)] * 3
    assert best_plan(replace(shape, top_k=1), 16, h200).source == "heuristic"
    assert len(warnings()) == 1
    assert str(path) in warnings()[0]


def test_a_file_that_may_not_be_read_is_one_warning(folders, put, make_table, shape, h200, warnings, monkeypatch):
    path = put(folders["config"], make_table())

    def forbidden(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(table_file.os, "open", forbidden)
    assert best_plan(shape, 16, h200).source == "heuristic"
    assert warnings() == [f"table ignored: {path}: cannot be read (Permission denied); mend its permissions"]


def test_a_folder_that_may_not_be_listed_or_does_not_exist_is_one_warning(
    folders, put, make_table, shape, h200, warnings, monkeypatch
):
    shipped = put(folders["shipped"], make_table())
    monkeypatch.setenv("MOETUNE_CONFIG_DIR", str(folders["config"] / "absent"))
    real = Path.iterdir

    def forbidden(self):
        if self == folders["user"]:
            raise PermissionError(13, "Permission denied")
        return real(self)

    monkeypatch.setattr(Path, "iterdir", forbidden)
    reload()
    assert best_plan(shape, 16, h200).path == str(shipped)
    assert len(warnings()) == 2
    assert "MOETUNE_CONFIG_DIR names" in warnings()[0]
    assert "cannot be listed" in warnings()[1]


def test_a_folder_that_is_no_folder_of_tables_is_not_walked(
    folders, put, make_table, shape, h200, warnings, monkeypatch
):
    shipped = put(folders["shipped"], make_table())
    monkeypatch.setattr(table_file, "MAX_FILES", 20)
    for number in range(30):
        (folders["config"] / f"{number}.json").write_text("{}")
    assert best_plan(shape, 16, h200).path == str(shipped)
    assert len(warnings()) == 1


def test_the_good_rows_of_a_partly_bad_file_serve_with_one_warning(folders, put, make_table, shape, h200, warnings):
    def damage(document):
        document["entries"]["16"]["plan"]["gate_up"]["block_n"] = 48
        document["entries"]["abc"] = {}

    path = put(folders["user"], make_table(), damage)
    before = path.read_bytes()
    assert [best_plan(shape, tokens, h200).source for tokens in (8, 16, 24)] == ["table", "heuristic", "table"]
    assert len(warnings()) == 1
    assert "block_n must be one of" in warnings()[0]
    assert path.read_bytes() == before


def test_a_row_that_needs_more_shared_memory_than_this_card_is_dropped_with_both_numbers(
    folders, put, make_table, shape, h200, warnings
):
    large = make_table()
    down = replace(large.entries[16].plan.down, block_n=128, block_k=128, prefetch_distance=5)
    big = replace(large.entries[16], plan=replace(large.entries[16].plan, down=down))
    put(folders["user"], replace(large, entries=large.entries | {16: big}))
    small = replace(h200, smem_limit=101_376)
    assert [best_plan(shape, tokens, h200).source for tokens in (8, 16)] == ["table", "table"]
    resolved = best_plan(shape, 16, small)
    assert resolved.source == "heuristic"
    assert resolved.plan.why_not(small, shape) is None
    warned = [text for text in warnings() if "shared memory" in text]
    assert len(warned) == 1
    assert "147,456" in warned[0]
    assert "101,376" in warned[0]


def test_tables_of_other_kernels_serve_with_one_warning(folders, put, make_table, shape, h200, warnings):
    def age(document):
        document["kernels"]["source_sha256"] = "0" * 64

    put(folders["user"], make_table(), age)
    assert [best_plan(shape, tokens, h200).source for tokens in (8, 16)] == ["table", "table"]
    assert len(warnings()) == 1
    assert "kernels changed" in warnings()[0]


def test_a_sound_table_warns_of_nothing(folders, put, make_table, shape, h200, warnings):
    put(folders["user"], make_table())
    best_plan(shape, 16, h200)
    assert warnings() == []


def test_an_edited_table_serves_after_reload_and_not_before(folders, put, make_table, shape, h200):
    put(folders["user"], make_table((8, 16)))
    assert best_plan(shape, 24, h200).entry_tokens == 16
    put(folders["user"], make_table((8, 16, 24)))
    assert best_plan(shape, 24, h200).entry_tokens == 16
    reload()
    assert best_plan(shape, 24, h200).entry_tokens == 24


@pytest.mark.parametrize("with_table", [True, False])
def test_ten_thousand_counts_cost_microseconds_each_and_bounded_memory(
    folders, put, make_table, shape, h200, monkeypatch, with_table
):
    if with_table:
        put(folders["user"], make_table(tuple(1 << power for power in range(15))))
    best_plan(shape, 1, h200)
    reads = []
    monkeypatch.setattr(table_file.os, "open", lambda *args, **kwargs: reads.append(args))
    start = time.process_time()
    for tokens in range(1, 10_001):
        best_plan(shape, tokens, h200)
    first_us = (time.process_time() - start) * 100
    start = time.process_time()
    for _ in range(10_000):
        best_plan(shape, 10_000, h200)
    again_us = (time.process_time() - start) * 100
    assert reads == []
    assert first_us < 100  # about 8 here; a forward takes 20 and more
    assert again_us < 20  # about 0.5 here
    assert lookup._resolve.cache_info().currsize <= 4096


def test_two_ranks_views_of_one_layer_do_not_share_a_default_plan(folders, h200):
    alone = MoEShape(hidden=2048, inter=768, local_experts=16, top_k=8)
    of_many = replace(alone, experts=128)
    assert alone == of_many
    blocks = [best_plan(view, 256, h200).plan.block_m for view in (alone, of_many, alone)]
    assert blocks == [128, 32, 128]


def test_a_negative_count_is_refused(folders, shape, h200):
    with pytest.raises(ShapeError, match="-1"):
        best_plan(shape, -1, h200)


def test_the_largest_file_that_is_read_is_a_table(folders, put, make_table, shape, h200):
    path = put(folders["user"], make_table())
    path.write_bytes(path.read_bytes().ljust(MAX_TABLE_BYTES))
    assert best_plan(shape, 16, h200).source == "table"
