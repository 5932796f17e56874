from __future__ import annotations

import pytest

from moetune.errors import UsageError
from moetune.models.catalogue import CATALOGUE, find_model, models_of
from moetune_kernels.shape import MoEShape


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_entry_makes_a_legal_shape_and_says_where_its_numbers_come_from(name):
    model = CATALOGUE[name]
    MoEShape(hidden=model.hidden, inter=model.inter, local_experts=model.experts, top_k=model.top_k)
    assert model.name == name == name.lower()
    assert model.source


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mixtral-8x7b", (4096, 14336, 8, 2)),
        ("mixtral-8x22b", (6144, 16384, 8, 2)),
        ("qwen3-30b-a3b", (2048, 768, 128, 8)),
        ("qwen3-235b-a22b", (4096, 1536, 128, 8)),
        ("qwen3-next-80b", (2048, 512, 512, 10)),
        ("gpt-oss-120b", (2880, 2880, 128, 4)),
        ("deepseek-v3", (7168, 2048, 256, 8)),
        ("deepseek-v2-lite", (2048, 1408, 64, 6)),
        ("olmoe", (2048, 1024, 64, 8)),
        ("phi-3.5-moe", (4096, 6400, 16, 2)),
    ],
)
def test_published_sizes(name, sizes):
    model = find_model(name)
    assert (model.hidden, model.inter, model.experts, model.top_k) == sizes


def test_a_hub_name_with_organisation_and_capitals_is_found():
    assert find_model("Qwen/Qwen3-30B-A3B").name == "qwen3-30b-a3b"


def test_a_misspelt_model_suggests_near_ones():
    with pytest.raises(UsageError, match=r"did you mean .*mixtral-8x7b.*`--model list` names all 24;"):
        find_model("mixtrl-8x7b")


def test_a_name_like_no_model_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"known are .*qwen3-30b-a3b.*--config"):
        find_model("zzzzzzzz\x1b[31m")


def test_asking_for_the_list_names_every_model():
    with pytest.raises(UsageError) as caught:
        find_model("list")
    assert ", ".join(CATALOGUE) in str(caught.value)


def test_a_shape_key_leads_back_to_every_model_that_has_it():
    assert [model.name for model in models_of("e256_h7168_i2048_k8_bf16")] == ["deepseek-v3"]
    assert models_of("e8_h4096_i7168_k2_bf16") == ()  # mixtral-8x7b over two ranks is no whole model
