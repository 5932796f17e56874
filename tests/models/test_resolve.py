from __future__ import annotations

import json

import pytest

from moetune.errors import UsageError
from moetune.models.resolve import ShapeRequest, layer_options, resolve_shape
from moetune_kernels.shape import WeightFormat


def test_nothing_given_is_the_default_layer():
    resolved = resolve_shape(ShapeRequest())
    assert resolved.shape.key == "e64_h4096_i14336_k2_bf16"
    assert resolved.name is None


def test_tp_divides_the_width_and_ep_the_experts():
    resolved = resolve_shape(ShapeRequest(model="qwen3-30b-a3b", tp=2, ep=4))
    assert resolved.shape.key == "e32_h2048_i384_k8_bf16"
    assert resolved.shape.experts == 128
    assert resolved.name == "qwen3-30b-a3b"


def test_a_tp_that_does_not_divide_names_the_sizes_that_do():
    with pytest.raises(UsageError, match=r"--tp 5 does not divide .* 768; sizes that do: 1, 2, 3, 4, 6, 8"):
        resolve_shape(ShapeRequest(model="qwen3-30b-a3b", tp=5))


def test_experts_that_do_not_divide_give_rank_zero_the_larger_share_and_say_so():
    resolved = resolve_shape(ShapeRequest(experts=10, top_k=2, ep=4))
    assert resolved.shape.local_experts == 3
    assert any("2 hold 3, 2 hold 2" in note for note in resolved.notes)


def test_top_k_may_exceed_the_experts_of_one_rank():
    assert resolve_shape(ShapeRequest(experts=16, top_k=8, ep=8)).shape.local_experts == 2


def test_flags_override_the_model_and_are_noted():
    resolved = resolve_shape(ShapeRequest(model="mixtral-8x7b", inter=1024))
    assert resolved.shape.inter == 1024
    assert resolved.name is None
    assert any("--inter 1024 replaces the 14336 of mixtral-8x7b" in note for note in resolved.notes)


def test_flags_answer_what_a_config_lacks(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_experts": 16, "num_experts_per_tok": "two", "hidden_size": 512}))
    with pytest.raises(UsageError, match=r"config\.json: .*give --inter"):
        resolve_shape(ShapeRequest(config=path))
    assert resolve_shape(ShapeRequest(config=path, inter=256, top_k=4)).shape.key == "e16_h512_i256_k4_bf16"


@pytest.mark.parametrize(
    ("request_fields", "said"),
    [
        ({"hidden": 0}, "--hidden must be a whole number from 1"),
        ({"inter": -5}, "--inter must be"),
        ({"experts": 100_000}, "--experts must be a whole number from 1 to 1024"),
        ({"top_k": 17}, "--top-k must be a whole number from 1 to 16"),
        ({"experts": 4, "top_k": 5}, "--top-k 5 is more than the 4 experts"),
        ({"tp": 0}, "--tp must be"),
        ({"ep": -1}, "--ep must be"),
        ({"experts": 8, "ep": 9}, "--ep 9 is more than the 8 experts"),
        ({"model": "mixtral-8x7b", "config": "config.json"}, "give one of them"),
    ],
)
def test_sizes_that_make_no_sense_name_their_flag(request_fields, said):
    with pytest.raises(UsageError, match=said):
        resolve_shape(ShapeRequest(**request_fields))


@pytest.mark.parametrize(
    "weight_format", [one for one in WeightFormat if not one.is_dense16], ids=lambda one: one.value
)
def test_a_format_that_the_kernels_lack_names_what_works(weight_format):
    with pytest.raises(UsageError, match=r"--format bf16 or --format fp16"):
        resolve_shape(ShapeRequest(format=weight_format))


def test_a_quantized_checkpoint_is_never_tuned_as_bf16_in_silence():
    with pytest.raises(UsageError, match=r"deepseek-v3 stores its experts as fp8-block.*--format bf16"):
        resolve_shape(ShapeRequest(model="deepseek-v3"))
    resolved = resolve_shape(ShapeRequest(model="deepseek-v3", format=WeightFormat.BF16))
    assert resolved.shape.key == "e256_h7168_i2048_k8_bf16"
    assert any("sigmoid" in note for note in resolved.notes)


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("e64_h4096_i14336_k2_bf16", ""),
        ("e8_h4096_i14336_k2_bf16", "--model mixtral-8x7b"),
        ("e32_h2880_i2880_k4_bf16", "--model gpt-oss-20b --format bf16"),
        ("e8_h512_i256_k2_fp16", "--hidden 512 --inter 256 --experts 8 --top-k 2 --format fp16"),
        ("e8_h512_i256_k2_bf16_odd", None),
    ],
)
def test_a_shape_key_is_named_by_the_options_that_lead_to_it(key, options):
    assert layer_options(key) == options
