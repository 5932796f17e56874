"""Hostile values: every type is born valid, every parser answers with an error of ours, and the lookup with a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from moetune_kernels import lookup
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS, DeviceInfo, device_info
from moetune_kernels.errors import MoetuneError, ShapeError, TableError, UnsupportedConfigError, UnsupportedDeviceError
from moetune_kernels.lookup import best_plan
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape
from moetune_kernels.table import TunedTable

H200 = TARGETS["sm_90"]
SHAPE = MoEShape(hidden=512, inter=256, local_experts=8, top_k=2)
CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
PLAN = LayerPlan(gate_up=CONFIG, down=CONFIG)
HUGE = 10**5000  # Python prints no number of more than 4,300 digits
VALUES: dict[str, Any] = {
    "true": True, "a fraction": 1.5, "NaN": float("nan"), "infinity": float("inf"), "minus one": -1, "past 64 bits": 1 << 70,
    "5000 digits": HUGE, "null": None, "text": "16", "a list": [16], "an object": {"16": 16}, "no text": "",
    "another script": "\uff11\uff16", "half a character": "\ud800", "a null byte": "a\0b", "long": "x" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_no_field_takes_a_value_of_another_kind(value):
    for name in ("hidden", "inter", "local_experts", "top_k", "format", "activation", "w13_layout"):
        with pytest.raises(ShapeError, match=name):
            replace(SHAPE, **{name: value})
    for name in ("structure", "block_m", "block_n", "block_k", "num_warps", "prefetch_distance", "group_m", "split_k"):
        with pytest.raises(UnsupportedConfigError, match=name):
            replace(CONFIG, **{name: value})
    for name in ("gate_up", "down", "routing", "combine"):
        with pytest.raises(UnsupportedConfigError, match=name):
            replace(PLAN, **{name: value})
    if value is not None:
        with pytest.raises(ShapeError, match="experts"):
            replace(SHAPE, experts=value)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_message_stays_short_whatever_it_shows(value):
    with pytest.raises(ShapeError) as caught:
        replace(SHAPE, hidden=value)
    assert len(str(caught.value)) < 200


def test_numbers_written_as_true_are_not_one():
    assert replace(SHAPE, top_k=1).top_k == 1
    with pytest.raises(ShapeError, match="top_k"):
        replace(SHAPE, top_k=True)


@pytest.mark.parametrize("name", [name for name in VALUES if name != "null"])
def test_the_lookup_takes_whole_token_counts_and_real_devices(folders, name):
    del folders
    with pytest.raises(ShapeError, match="tokens must be a whole number from 0 to 131072"):
        best_plan(SHAPE, VALUES[name], H200)
    with pytest.raises(UnsupportedDeviceError):
        best_plan(SHAPE, 1, VALUES[name])
    with pytest.raises(ShapeError, match="shape must be a MoEShape"):
        best_plan(VALUES[name], 1, H200)


def test_a_torch_device_names_the_gpu_that_it_is(folders, monkeypatch):
    import torch

    del folders
    asked = []
    monkeypatch.setattr(lookup, "device_info", lambda index: asked.append(index) or H200)
    monkeypatch.setattr(lookup, "current_device", lambda: asked.append("current") or H200)
    for device in (torch.device("cuda", 1), torch.device("cuda")):
        assert best_plan(SHAPE, 16, device) == best_plan(SHAPE, 16, H200)
    assert asked == [1, "current"]
    for device in (torch.device("cpu"), torch.device("meta", 0), "cuda"):
        with pytest.raises(UnsupportedDeviceError, match=r"a CUDA torch\.device, a CUDA index or None, got"):
            best_plan(SHAPE, 16, device)


def test_more_tokens_than_one_call_takes_are_refused(folders):
    del folders
    assert best_plan(SHAPE, 131_072, H200).source == "heuristic"
    with pytest.raises(ShapeError, match="131072"):
        best_plan(SHAPE, 131_073, H200)


def test_no_index_below_zero_names_a_device():
    with pytest.raises(UnsupportedDeviceError, match="no CUDA device -1"):
        device_info(-1)


def test_sizes_that_overflow_32_bits_are_refused_where_kernels_count_in_them():
    with pytest.raises(ShapeError, match="hidden x inter"):
        MoEShape(hidden=65_536, inter=32_768, local_experts=1, top_k=1)
    many = MoEShape(hidden=64, inter=1 << 20, local_experts=1024, top_k=1)  # 2^31 rows of w13
    tma = replace(CONFIG, structure=Structure.TMA)
    assert "2,147,483,648 rows" in (tma.why_not(H200, many, Role.GATE_UP) or "")
    assert tma.why_not(H200, replace(many, local_experts=1023), Role.GATE_UP) is None
    assert tma.why_not(H200, many, Role.DOWN) is None
    assert CONFIG.why_not(H200, many, Role.GATE_UP) is None


def leaves(value: Any, path: tuple = ()):
    """Yield the path of every value in a document, objects and lists included."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))


def planted(document: Any, path: tuple, value: Any) -> bytes:
    changed = json.loads(json.dumps(document))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(changed).encode()


def parsed_or_told(data: bytes) -> TunedTable | str:
    try:
        return TunedTable.parse(data, "here.json")
    except TableError as error:
        return str(error)


@pytest.mark.parametrize("name", [name for name in VALUES if name != "5000 digits"])
def test_any_value_anywhere_in_a_table_is_a_table_error_or_a_table_that_works(make_table, name):
    """No other exception, ever; and what comes out of a damaged table is an entry that this device runs."""
    document = make_table((8, 16)).to_json()
    for path in leaves(document):
        table = parsed_or_told(planted(document, path, VALUES[name]))
        if isinstance(table, str):
            assert "here.json" in table, path
            assert len(table) < 700, path
            continue
        for tokens in (1, 8, 11, 16, 32, 33):
            entry = table.entry_for(tokens)
            assert entry is None or entry.plan.why_not(table.device, table.shape) is None, path


@pytest.mark.parametrize("data", [None, "{}", 1, [], {}], ids=repr)
def test_a_table_is_parsed_from_bytes(data):
    with pytest.raises(TableError, match="bytes"):
        TunedTable.parse(data, "here.json")


@pytest.mark.parametrize(
    "parse", [MoEKernelConfig.from_json, LayerPlan.from_json, MoEShape.from_json, DeviceInfo.from_json]
)
@pytest.mark.parametrize(
    "value", [None, [], 1, "x", {}, {1: 2}, float("nan"), {"structure": []}, {"name": {}}], ids=repr
)
def test_parsers_answer_with_errors_of_ours(parse, value):
    with pytest.raises(MoetuneError):
        parse(value)
