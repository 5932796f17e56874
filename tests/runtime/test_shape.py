"""The shape: the key of every table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moetune_kernels.errors import ShapeError
from moetune_kernels.shape import MAX_EXPERTS, MAX_TOP_K, MoEShape, WeightFormat

BASE = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)


def test_the_key_names_what_a_table_is_for():
    assert BASE.key == "e8_h4096_i14336_k2_bf16"
    assert replace(BASE, format=WeightFormat.FP8_BLOCK).key == "e8_h4096_i14336_k2_fp8-block"


@pytest.mark.parametrize(
    "change",
    [{"hidden": 2048}, {"inter": 7168}, {"local_experts": 16}, {"top_k": 1}, {"format": WeightFormat.FP16}],
    ids=str,
)
def test_no_two_layers_that_differ_share_a_key(change):
    other = replace(BASE, **change)
    assert other != BASE
    assert other.key != BASE.key


def test_gating_and_the_models_expert_count_are_no_part_of_the_key():
    informed = replace(BASE, experts=64, gating="sigmoid")
    assert informed == BASE
    assert hash(informed) == hash(BASE)
    assert informed.key == BASE.key


def test_json_comes_back_as_it_went_out():
    shape = replace(BASE, format=WeightFormat.MXFP4)
    assert MoEShape.from_json(shape.to_json()) == shape


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden": 0}, "hidden"),
        ({"hidden": -4096}, "hidden"),
        ({"hidden": 4096.0}, "hidden"),
        ({"hidden": "4096"}, "hidden"),
        ({"inter": True}, "inter"),
        ({"inter": 10**30}, "inter"),
        ({"local_experts": MAX_EXPERTS + 1}, "local_experts"),
        ({"top_k": MAX_TOP_K + 1}, "top_k"),
        ({"top_k": 9}, "top_k=9"),
        ({"format": "fp7"}, "format"),
        ({"format": ["bf16"]}, "format"),
        ({"activation": None}, "activation"),
        ({"surprise": 1}, "surprise"),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused_by_name(change, named):
    with pytest.raises(ShapeError, match=named):
        MoEShape.from_json(BASE.to_json() | change)


@pytest.mark.parametrize("value", [None, [], "e8", 3], ids=str)
def test_something_that_is_no_object_is_refused(value):
    with pytest.raises(ShapeError, match="must be an object"):
        MoEShape.from_json(value)


def test_a_missing_field_is_refused_by_name():
    document = BASE.to_json()
    del document["top_k"]
    with pytest.raises(ShapeError, match="top_k"):
        MoEShape.from_json(document)


def test_top_k_may_exceed_the_experts_of_one_rank_but_not_of_the_model():
    assert MoEShape(hidden=64, inter=64, local_experts=2, top_k=4, experts=8).top_k == 4
    with pytest.raises(ShapeError, match="top_k=4"):
        MoEShape(hidden=64, inter=64, local_experts=2, top_k=4)


def test_one_expert_weighs_three_matrices():
    assert BASE.expert_bytes == 3 * 4096 * 14336 * 2
    assert replace(BASE, format=WeightFormat.INT4).expert_bytes == 3 * 4096 * 14336 // 2
