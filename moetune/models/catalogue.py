"""Published Mixture-of-Experts models and the sizes of their layers.

Every entry says where its numbers were read. Shared experts and dense layers are not part of the tuned layer, so they
are not listed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from moetune.errors import UsageError
from moetune_kernels.shape import MoEShape, WeightFormat

HF_CONFIG = "a copy of the model's config.json from Hugging Face"
HF_CLASS = "the defaults of the model's configuration class in transformers 5.24"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One published model: the sizes of its routed experts before ``--tp`` and ``--ep``.

    Args:
        name: how the command line calls it.
        hidden: H, the width that the experts read and write.
        inter: I, the width of one expert.
        experts: routed experts of one layer.
        top_k: K, experts per token.
        source: where the numbers were read.
        format: how the reference checkpoint stores the expert weights.
        gating: how the router scores.
        differs: what the real layer does that the kernels do not do yet; None when nothing.
    """

    name: str
    hidden: int
    inter: int
    experts: int
    top_k: int
    source: str
    format: WeightFormat = WeightFormat.BF16
    gating: str = "softmax"
    differs: str | None = None


_GPT_OSS = "the real layer adds expert biases and clamps an interleaved SwiGLU; the plain SwiGLU of its sizes is tuned"

_MODELS = (
    Model(name="mixtral-8x7b", hidden=4096, inter=14336, experts=8, top_k=2, source=HF_CONFIG),
    Model(name="mixtral-8x22b", hidden=6144, inter=16384, experts=8, top_k=2, source=HF_CONFIG),
    Model(name="qwen1.5-moe-a2.7b", hidden=2048, inter=1408, experts=60, top_k=4, source=HF_CLASS),
    Model(name="qwen2-57b-a14b", hidden=3584, inter=2560, experts=64, top_k=8, source=HF_CONFIG),
    Model(name="qwen3-30b-a3b", hidden=2048, inter=768, experts=128, top_k=8, source=HF_CONFIG),
    Model(name="qwen3-235b-a22b", hidden=4096, inter=1536, experts=128, top_k=8, source=HF_CONFIG),
    Model(name="qwen3-coder-480b", hidden=6144, inter=2560, experts=160, top_k=8, source=HF_CONFIG),
    Model(name="qwen3-next-80b", hidden=2048, inter=512, experts=512, top_k=10, source=HF_CONFIG),
    Model(name="qwen3.5-35b-a3b", hidden=2048, inter=512, experts=256, top_k=8, source=HF_CONFIG),
    Model(name="qwen3.5-122b-a10b", hidden=3072, inter=1024, experts=256, top_k=8, source=HF_CONFIG),
    Model(name="qwen3.5-397b-a17b", hidden=4096, inter=1024, experts=512, top_k=10, source=HF_CONFIG),
    Model(name="deepseek-v2-lite", hidden=2048, inter=1408, experts=64, top_k=6, source=HF_CLASS),
    Model(name="deepseek-v2", hidden=5120, inter=1536, experts=160, top_k=6, source=HF_CONFIG),
    Model(
        name="deepseek-v3",
        hidden=7168,
        inter=2048,
        experts=256,
        top_k=8,
        source=HF_CONFIG,
        format=WeightFormat.FP8_BLOCK,
        gating="sigmoid",
    ),
    Model(
        name="kimi-k2",
        hidden=7168,
        inter=2048,
        experts=384,
        top_k=8,
        source=HF_CONFIG,
        format=WeightFormat.FP8_BLOCK,
        gating="sigmoid",
    ),
    Model(name="glm-4.5", hidden=5120, inter=1536, experts=160, top_k=8, source=HF_CONFIG, gating="sigmoid"),
    Model(name="glm-4.5-air", hidden=4096, inter=1408, experts=128, top_k=8, source=HF_CLASS, gating="sigmoid"),
    Model(
        name="minimax-m2.5",
        hidden=3072,
        inter=1536,
        experts=256,
        top_k=8,
        source=HF_CONFIG,
        format=WeightFormat.FP8_BLOCK,
        gating="sigmoid",
    ),
    Model(
        name="gpt-oss-120b",
        hidden=2880,
        inter=2880,
        experts=128,
        top_k=4,
        source=HF_CONFIG,
        format=WeightFormat.MXFP4,
        differs=_GPT_OSS,
    ),
    Model(
        name="gpt-oss-20b",
        hidden=2880,
        inter=2880,
        experts=32,
        top_k=4,
        source=HF_CONFIG,
        format=WeightFormat.MXFP4,
        differs=_GPT_OSS,
    ),
    Model(name="olmoe", hidden=2048, inter=1024, experts=64, top_k=8, source=HF_CONFIG),
    Model(name="phi-3.5-moe", hidden=4096, inter=6400, experts=16, top_k=2, source=HF_CLASS, gating="sparsemixer"),
    Model(name="dbrx", hidden=6144, inter=10752, experts=16, top_k=4, source=HF_CONFIG),
    Model(name="jamba-1.5-mini", hidden=4096, inter=14336, experts=16, top_k=2, source=HF_CLASS),
)

LIST_ALL = "list"  # no model's name: asking for it names them all
CATALOGUE: Mapping[str, Model] = {model.name: model for model in _MODELS}


def models_of(key: str) -> tuple[Model, ...]:
    """Return the models whose layer, in bf16 and undivided, has this shape key.

    >>> [model.name for model in models_of("e8_h4096_i14336_k2_bf16")]
    ['mixtral-8x7b']
    """
    return tuple(model for model in _MODELS if _bf16_key(model) == key)


def _bf16_key(model: Model) -> str:
    return MoEShape(hidden=model.hidden, inter=model.inter, local_experts=model.experts, top_k=model.top_k).key


def find_model(name: str) -> Model:
    """Return the catalogue's entry; case and a leading organisation (``Qwen/``) do not matter.

    Raises:
        UsageError: the catalogue has no such model; the sentence names the nearest ones and how to see all of them.

    >>> find_model("Qwen/Qwen3-30B-A3B").inter
    768
    """
    key = name.rsplit("/", maxsplit=1)[-1].strip().lower()
    if key in CATALOGUE:
        return CATALOGUE[key]
    near = [] if key == LIST_ALL else difflib.get_close_matches(key, CATALOGUE, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? `--model {LIST_ALL}` names all {len(CATALOGUE)}"
    if not near:
        hint = f"known are {', '.join(CATALOGUE)}"
    raise UsageError(f"no model {name[:80]!r}: {hint}; or give --config config.json, or the sizes by flags")
