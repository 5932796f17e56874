"""What is tuned is what is looked up: a model's config and the tensors of a call make one key."""

from __future__ import annotations

import json

import pytest

from moetune.models.resolve import ShapeRequest, resolve_shape
from moetune_kernels.device import TARGETS
from moetune_kernels.lookup import best_plan, reload
from moetune_kernels.shape import MoEShape, WeightFormat

torch = pytest.importorskip("torch")

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 64, "moe_intermediate_size": 1024, "hidden_size": 2048,
    "num_experts_per_tok": 4,
}  # fmt: skip
DTYPES = {WeightFormat.BF16: torch.bfloat16, WeightFormat.FP16: torch.float16}


def of_tensors(shape: MoEShape, tp: int) -> MoEShape:
    """Return the key of a call whose weights one rank of ``tp`` would hold."""
    from moetune_kernels.fused_moe.layer import Weights

    sizes = (64, 2 * 1024 // tp, 2048), (64, 2048, 1024 // tp)
    w13, w2 = (torch.empty(size, dtype=DTYPES[shape.format], device="meta") for size in sizes)
    return Weights(w13, w2).shape(4)


@pytest.mark.parametrize("weight_format", DTYPES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tune_then_look_up_is_a_hit(folders, put, make_table, tmp_path, weight_format, tp):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL))
    tuned = resolve_shape(ShapeRequest(config=config, tp=tp, format=weight_format)).shape
    assert (tuned.local_experts, tuned.inter) == (64, 1024 // tp)
    served = of_tensors(tuned, tp)
    assert served == tuned
    assert served.key == tuned.key
    path = put(folders["user"], make_table(shape=tuned))
    reload()
    assert best_plan(served, 16, TARGETS["sm_90"]).path == str(path)
