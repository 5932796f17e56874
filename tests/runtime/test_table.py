"""One table: what is read from it, and what never is."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from moetune_kernels.errors import TableError
from moetune_kernels.table import MAX_ENTRIES, MAX_TABLE_BYTES, TunedTable, parse_key, serve_ranges

NAN, INFINITY = float("nan"), float("inf")


def parsed(document) -> TunedTable:
    return TunedTable.parse(json.dumps(document).encode(), "here.json")


def test_json_comes_back_as_it_went_out(make_table):
    table = make_table()
    again = parsed(table.to_json())
    assert again == table
    assert again.faults == ()
    assert list(again.entries) == [8, 16, 24]


def test_a_config_in_the_file_says_its_threads_and_warp_size(make_table):
    written = make_table().to_json()["entries"]["16"]["plan"]["gate_up"]
    assert (written["block_size"], written["warp_size"]) == (128, 32)


def test_neighbours_meet_at_their_geometric_mean_and_the_smaller_one_wins_a_tie():
    assert serve_ranges([8, 16, 24]) == {8: (8, 11), 16: (12, 19), 24: (20, 48)}
    assert serve_ranges([64, 256]) == {64: (64, 128), 256: (129, 512)}
    assert serve_ranges([256, 64, 64]) == serve_ranges([64, 256])
    assert serve_ranges([1]) == {1: (1, 2)}
    assert serve_ranges([]) == {}


@pytest.mark.parametrize(
    ("ladder", "expected"),
    [
        ((1, 2, 4, 8), {1: 1, 3: 4, 7: 8, 8: 8, 9: 8, 16: 8, 17: None, 64: None, 2048: None, 16384: None}),
        ((64,), {1: None, 63: None, 64: 64, 65: 64, 128: 64, 129: None, 1024: None}),
        ((64, 256), {128: 64, 129: 256, 160: 256, 512: 256, 513: None}),
    ],
)
def test_a_short_ladder_never_serves_far_away_counts(make_table, ladder, expected):
    table = make_table(ladder)
    served = {tokens: table.entry_for(tokens) for tokens in expected}
    assert {tokens: entry and entry.tokens for tokens, entry in served.items()} == expected


def test_a_range_that_claims_everything_is_not_believed_past_the_ladders_ends(make_table):
    document = make_table((4, 8)).to_json()
    document["entries"]["8"]["serves"] = [1, 131_072]
    table = parsed(document)
    assert [entry and entry.tokens for entry in map(table.entry_for, (1, 4, 8, 16, 17, 16_384))] == [
        None,
        4,
        8,
        8,
        None,
        None,
    ]


def test_where_ranges_overlap_the_nearest_by_ratio_serves(make_table):
    document = make_table((8, 32)).to_json()
    for entry in document["entries"].values():
        entry["serves"] = [8, 64]
    table = parsed(document)
    assert [entry.tokens for entry in map(table.entry_for, (15, 16, 17)) if entry] == [8, 8, 32]


BAD_ENTRIES = {
    "an unknown field": lambda entry: entry.update(surprise=1),
    "no median": lambda entry: entry.pop("median_us"),
    "a NaN time": lambda entry: entry.update(median_us=NAN),
    "an infinite bound": lambda entry: entry.update(bound_us=INFINITY),
    "a negative spread": lambda entry: entry.update(spread_us=-1),
    "a text for a time": lambda entry: entry.update(median_us="90"),
    "true for a time": lambda entry: entry.update(median_us=True),
    "a number of 4000 digits": lambda entry: entry.update(median_us=10**4000),
    "serves elsewhere": lambda entry: entry.update(serves=[100, 200]),
    "serves one number": lambda entry: entry.update(serves=[16]),
    "serves text": lambda entry: entry.update(serves="16"),
    "no plan": lambda entry: entry.update(plan=None),
    "a plan of lists": lambda entry: entry.update(plan=[1, 2]),
    "a row without num_warps of one kind": lambda entry: entry["plan"]["down"].update(num_warps=None),
    "48 columns": lambda entry: entry["plan"]["gate_up"].update(block_n=48),
    "no prefetch": lambda entry: entry["plan"]["gate_up"].update(prefetch_distance=0),
    "an unknown structure": lambda entry: entry["plan"]["gate_up"].update(structure="__import__('os')"),
    "two block_m": lambda entry: entry["plan"]["down"].update(block_m=64),
    "more shared memory than the device": lambda entry: entry["plan"]["down"].update(
        block_n=256, block_k=256, prefetch_distance=8
    ),
    "an unknown source": lambda entry: entry.update(bandwidth_gbps={"value": 1, "source": "guess"}),
    "no value and no reason": lambda entry: entry.update(bandwidth_gbps={"value": None, "source": "unavailable"}),
    "a value that is unavailable": lambda entry: entry.update(
        bandwidth_gbps={"value": 1, "source": "unavailable", "reason": "x"}
    ),
    "a figure that is a number": lambda entry: entry.update(issue_efficiency=0.5),
}


@pytest.mark.parametrize("damage", BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_a_bad_entry_is_dropped_by_name_and_the_others_serve(make_table, damage):
    document = make_table().to_json()
    damage(document["entries"]["16"])
    table = parsed(document)
    assert list(table.entries) == [8, 24]
    assert len(table.faults) == 1
    assert table.faults[0].startswith("entry '16': ")


@pytest.mark.parametrize("key", ["abc", "-4", "0", "016", "1.5", "", "٣", "9" * 5000, "131073"])
def test_a_key_that_is_no_token_count_is_dropped(make_table, key):
    document = make_table().to_json()
    document["entries"][key] = document["entries"].pop("16")
    assert list(parsed(document).entries) == [8, 24]


def test_a_time_the_default_plan_could_not_give_may_be_null(make_table):
    document = make_table().to_json()
    document["entries"]["16"]["baseline_us"] = None
    entry = parsed(document).entries[16]
    assert entry.baseline_us is None


BAD_HEADERS = {
    "another schema": ("schema_version", 2),
    "a true schema": ("schema_version", True),
    "an unknown backend": ("backend", "dream"),
    "a backend of a list": ("backend", ["cuda"]),
    "a device that is a text": ("device", "NVIDIA H200"),
    "a device that is null": ("device", None),
    "a shape that is a list": ("shape", [1]),
    "ceilings of NaN": ("ceilings", {"bytes_per_s": NAN, "flops": 1}),
    "no ceilings": ("ceilings", {}),
    "kernels of numbers": ("kernels", {"version": 1, "source_sha256": 2}),
    "a version that is a number": ("triton", 3.6),
    "entries of a list": ("entries", []),
    "too many entries": ("entries", {str(count): {} for count in range(1, MAX_ENTRIES + 2)}),
}


@pytest.mark.parametrize(("field", "value"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_a_bad_header_drops_the_file_naming_file_field_and_fix(make_table, field, value):
    document = make_table().to_json() | {field: value}
    with pytest.raises(TableError, match=rf"^here.json: .*{field}.*moetune sweep") as caught:
        parsed(document)
    assert len(str(caught.value)) < 600


def test_a_header_that_lacks_a_field_is_refused_by_name(make_table):
    document = make_table().to_json()
    del document["command"], document["triton"]
    with pytest.raises(TableError, match="lacks command, triton"):
        parsed(document)


def test_an_unknown_header_field_is_a_fault_that_still_serves(make_table):
    table = parsed(make_table().to_json() | {"weather": "rain"})
    assert "weather" in table.faults[0]
    assert list(table.entries) == [8, 16, 24]


BAD_BYTES = {
    "empty": b"",
    "truncated": b'{"schema_version": 1, "device": {',
    "bad UTF-8": b'{"schema_version": "\xff\xfe"}',
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "nested too deeply": b"[" * 200_000,
    "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "an integer of 10,000 digits": b'{"schema_version": ' + b"1" * 10_000 + b"}",
    "a field twice": b'{"schema_version": 1, "schema_version": 1}',
    "python": b"__import__('os').system('true')",
    "NULs": b"\0" * 1000,
    "too large": b" " * (MAX_TABLE_BYTES + 1),
}


def test_text_instead_of_bytes_is_answered_with_the_call_to_make():
    for parse in (TunedTable.parse, parse_key):
        with pytest.raises(
            TableError, match=r"^a\.json: must be given as bytes, got str; pass `path\.read_bytes\(\)`$"
        ):
            parse("{}", "a.json")


@pytest.mark.parametrize("data", BAD_BYTES.values(), ids=BAD_BYTES)
def test_bytes_that_are_no_table_are_one_clear_error(data):
    for parse in (TunedTable.parse, parse_key):
        with pytest.raises(TableError, match=r"^here.json: ") as caught:
            parse(data, "here.json")
        assert len(str(caught.value)) < 600


def test_a_large_object_with_a_repeated_field_does_not_hold_a_forward():
    fields = ",".join(f'"{number}":1' for number in range(250_000))
    data = f'{{{fields},"249999":1}}'.encode()
    assert len(data) < MAX_TABLE_BYTES
    start = time.monotonic()
    with pytest.raises(TableError, match="twice"):
        TunedTable.parse(data, "here.json")
    assert time.monotonic() - start < 5


def test_a_byte_order_mark_is_no_fault(make_table):
    data = b"\xef\xbb\xbf" + json.dumps(make_table().to_json()).encode()
    assert TunedTable.parse(data, "here.json") == make_table()


def test_a_table_without_a_routing_is_of_uniform_routing_and_stays_as_it_was_written(make_table):
    document = make_table().to_json()
    assert "routing" not in document
    assert parsed(document).routing == "uniform"
    assert parsed(document).to_json() == document


def test_another_routing_is_part_of_the_header_and_comes_back(make_table):
    table = replace(make_table(), routing="zipf:1.1")
    document = table.to_json()
    assert document["routing"] == "zipf:1.1"
    assert parsed(document) == table
    assert parsed(document).faults == ()


@pytest.mark.parametrize("routing", [5, None, {}, "x" * 5000])
def test_a_routing_that_is_no_text_is_a_bad_header(make_table, routing):
    with pytest.raises(TableError, match="routing must be a text"):
        parsed(make_table().to_json() | {"routing": routing})
