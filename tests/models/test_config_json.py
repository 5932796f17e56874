"""Foreign config.json files: the four families that are read, and everything that must not become a wrong shape."""

from __future__ import annotations

import json
import os

import pytest

from moetune.errors import UsageError
from moetune.models import config_json
from moetune.models.config_json import read_config
from moetune.models.quantization import read_format
from moetune_kernels.shape import WeightFormat

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "torch_dtype": "bfloat16",
}
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "experts_per_token": 4,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
    "swiglu_limit": 7.0,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@pytest.fixture
def write(tmp_path):
    def write_config(value):
        path = tmp_path / "config.json"
        path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
        return path

    return write_config


@pytest.mark.parametrize(
    ("config", "sizes", "weight_format"),
    [
        pytest.param(MIXTRAL, (4096, 14336, 8, 2), WeightFormat.BF16, id="mixtral"),
        pytest.param(QWEN3, (2048, 768, 128, 8), WeightFormat.BF16, id="qwen3-moe"),
        pytest.param(GPT_OSS, (2880, 2880, 128, 4), WeightFormat.MXFP4, id="gpt-oss"),
        pytest.param(DEEPSEEK_V3, (7168, 2048, 256, 8), WeightFormat.FP8_BLOCK, id="deepseek-v3"),
        pytest.param(MIXTRAL | {"torch_dtype": "float16"}, (4096, 14336, 8, 2), WeightFormat.FP16, id="float16"),
    ],
)
def test_the_four_families_are_read(write, config, sizes, weight_format):
    reading = read_config(write(config))
    assert (reading.sizes["hidden"], reading.sizes["inter"], reading.sizes["experts"], reading.sizes["top_k"]) == sizes
    assert reading.format is weight_format
    assert reading.problems == {}
    assert reading.name == config["architectures"][0]


def test_the_dense_width_of_an_unknown_deepseek_never_becomes_the_experts_width(write):
    config = {"architectures": ["DeepseekV4ForCausalLM"], "n_routed_experts": 32, "num_experts_per_tok": 6}
    reading = read_config(
        write(config | {"moe_intermediate_size": 768, "intermediate_size": 9216, "hidden_size": 2048})
    )
    assert reading.sizes == {"hidden": 2048, "inter": 768, "experts": 32, "top_k": 6}
    assert any("moe_intermediate_size=768 and intermediate_size=9216 disagree" in note for note in reading.notes)


def test_an_unknown_architecture_with_only_a_dense_width_asks_for_inter(write):
    config = DEEPSEEK_V3 | {"architectures": ["NewForCausalLM"], "model_type": "new"}
    del config["moe_intermediate_size"]
    reading = read_config(write(config))
    assert "inter" not in reading.sizes
    assert "give --inter" in reading.problems["inter"]


def test_two_expert_counts_that_disagree_are_said(write):
    reading = read_config(write(QWEN3 | {"num_local_experts": 64}))
    assert reading.sizes["experts"] == 128
    assert any("num_experts=128 and num_local_experts=64 disagree" in note for note in reading.notes)


def test_a_dense_model_is_named_dense_with_the_fields_tried(write):
    llama = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008}
    with pytest.raises(
        UsageError, match=r"no MoE fields found \(tried n_routed_experts, num_experts,.*LlamaForCausalLM"
    ):
        read_config(write(llama))


def test_a_latent_width_is_not_taken_for_the_model_width(write):
    reading = read_config(write(QWEN3 | {"moe_latent_size": 1024}))
    assert "moe_latent_size" in reading.problems["hidden"]


def test_an_ungated_activation_is_refused(write):
    reading = read_config(write(QWEN3 | {"hidden_act": "relu2"}))
    assert "relu2" in reading.problems["activation"]


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        pytest.param({"quant_method": "fp8", "weight_block_size": [128, 128]}, WeightFormat.FP8_BLOCK, id="fp8-block"),
        pytest.param({"quant_method": "fp8"}, WeightFormat.FP8, id="fp8"),
        pytest.param(None, WeightFormat.BF16, id="null"),
        pytest.param(
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "block_structure": [128, 128]}}},
            },
            WeightFormat.FP8_BLOCK,
            id="compressed-tensors-block",
        ),
    ],
)
def test_quantization_beside_a_nested_text_model_is_kept(write, quantization, expected):
    text = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "hidden_size": 2048}
    config = {"architectures": ["XForConditionalGeneration"], "quantization_config": quantization, "text_config": text}
    reading = read_config(write(config))
    assert reading.sizes == {"hidden": 2048, "inter": 512, "experts": 64, "top_k": 8}
    assert reading.format is expected


@pytest.mark.parametrize(
    "quantization",
    [
        pytest.param({"quant_method": "magic"}, id="unknown-method"),
        pytest.param({}, id="no-method"),
        pytest.param("fp8", id="not-an-object"),
        pytest.param({"quant_method": "fp8", "weight_block_size": [64, 64]}, id="other-block"),
        pytest.param({"quant_method": "fp8", "weight_block_size": "big"}, id="block-not-a-list"),
        pytest.param({"quant_method": "compressed-tensors", "config_groups": []}, id="no-groups"),
        pytest.param(
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": [8]}}}},
            id="bits-not-a-number",
        ),
    ],
)
def test_an_unknown_quantization_is_an_error_never_a_guess(quantization):
    with pytest.raises(UsageError, match="give --format"):
        read_format({"quantization_config": quantization}, {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", 0),
        ("num_experts", -1),
        ("num_experts", 10**30),
        ("num_experts", 128.0),
        ("num_experts", "128"),
        ("num_experts", True),
        ("hidden_size", [2048]),
        ("num_experts_per_tok", float("nan")),
        ("moe_intermediate_size", {"a": 1}),
        ("moe_intermediate_size", "x" * 10_000),
    ],
)
def test_a_hostile_value_is_a_short_problem_not_a_size(write, field, value):
    reading = read_config(write(QWEN3 | {field: value}))
    assert len(reading.problems) == 1
    problem = next(iter(reading.problems.values()))
    assert field in problem
    assert len(problem) < 250


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"", "not valid JSON", id="empty"),
        pytest.param(b'{"num_experts": 8,', "not valid JSON", id="cut-off"),
        pytest.param(b"[" * 200_000, "not valid JSON", id="too-deep"),
        pytest.param(b'{"num_experts": ' + b"9" * 10_000 + b"}", "not valid JSON", id="number-too-long"),
        pytest.param(b"\xff\xfe{}", "not UTF-8", id="bad-utf8"),
        pytest.param(b"[]", "must hold a JSON object, got list", id="list"),
        pytest.param(b"NaN", "must hold a JSON object, got float", id="nan"),
        pytest.param(b"{}", "no MoE fields", id="no-fields"),
    ],
)
def test_a_damaged_file_gets_one_sentence(write, content, said):
    with pytest.raises(UsageError, match=said):
        read_config(write(content))


def test_a_huge_file_is_not_read(write, monkeypatch):
    monkeypatch.setattr(config_json, "MAX_CONFIG_BYTES", 10)
    with pytest.raises(UsageError, match="has at most 10"):
        read_config(write(QWEN3))


def test_a_folder_a_pipe_and_a_missing_file_are_refused_without_hanging(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, said in ((tmp_path, "is not a file"), (pipe, "is not a file"), (tmp_path / "none", "No such file")):
        with pytest.raises(UsageError, match=said):
            read_config(path)


def test_a_byte_order_mark_is_no_fault(write):
    assert read_config(write(b"\xef\xbb\xbf" + json.dumps(QWEN3).encode())).problems == {}


def test_infinity_in_a_field_that_is_not_read_is_no_fault(write):
    assert read_config(write(QWEN3 | {"time_step_limit": [0.0, float("inf")]})).problems == {}
