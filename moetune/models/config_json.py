"""Read the sizes of a Mixture-of-Experts layer from a Hugging Face ``config.json``.

The file is foreign: its size, encoding, types and numbers are checked before they are used. Fields are found by name,
on the text model inside a multimodal config too; the dense ``intermediate_size`` counts as an expert's width only for
the architectures that mean it so.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from moetune.errors import UsageError
from moetune.models.json_object import as_object
from moetune.models.quantization import read_format
from moetune_kernels.shape import MAX_DIMENSION, MAX_EXPERTS, MAX_TOP_K, WeightFormat

MAX_CONFIG_BYTES = 8 << 20  # the largest published ones, with long lists of unquantised layers, stay under 1 MiB

NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size",),
    "inter": ("moe_intermediate_size",),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
}
LIMITS: Mapping[str, int] = {
    "hidden": MAX_DIMENSION,
    "inter": MAX_DIMENSION,
    "experts": MAX_EXPERTS,
    "top_k": MAX_TOP_K,
}

_DENSE_WIDTH = "intermediate_size"
_DENSE_WIDTH_IS_EXPERT_WIDTH = frozenset(
    {"MixtralForCausalLM", "GptOssForCausalLM", "OlmoeForCausalLM", "PhiMoEForCausalLM", "JambaForCausalLM"}
    | {"MiniMaxM2ForCausalLM", "mixtral", "gpt_oss", "olmoe", "phimoe", "jamba", "minimax_m2"}
)
_TEXT_MODELS = (("text_config",), ("thinker_config", "text_config"), ("llm_config",), ("language_config",))
_ROUTED_WIDTH = ("moe_latent_size", "routed_expert_hidden_size")  # experts work in a narrower space than hidden_size
_SILU = ("silu", "swish")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigReading:
    """What a config file says; a size that could not be read is None and ``problems`` says why.

    Attributes:
        name: the architecture or model type, for people.
        sizes: hidden, inter, experts, top_k as far as they were read.
        format: the checkpoint's weight format, or None with a problem.
        gating: how the router scores.
        problems: per missing field (or ``format``), one sentence.
        notes: choices that were made and should be shown.
    """

    name: str
    sizes: Mapping[str, int]
    format: WeightFormat | None
    gating: str
    problems: Mapping[str, str]
    notes: tuple[str, ...]


def read_config(path: Path) -> ConfigReading:
    """Read ``path``; a field that is missing or wrong becomes a problem, which a flag may still answer.

    Raises:
        UsageError: the file cannot be read, is no JSON object, or describes a dense model.
    """
    top = _load(path)
    text = _text_model(top)
    name = _architecture(top, text)
    if not any(text.get(field) is not None for field in NAMES["experts"] + NAMES["inter"]):
        tried = ", ".join(NAMES["experts"] + NAMES["inter"])
        raise UsageError(
            f"{path}: no MoE fields found (tried {tried}); {name} looks dense, "
            "otherwise give --hidden --inter --experts --top-k without --config"
        )
    sizes: dict[str, int] = {}
    problems: dict[str, str] = {}
    notes: list[str] = []
    for size in NAMES:
        try:
            sizes[size] = _read_size(size, text, name, notes)
        except UsageError as error:
            problems[size] = str(error)
    problems |= _unsupported(text, name)
    try:
        weight_format = read_format(top, text)
    except UsageError as error:
        weight_format, problems["format"] = None, str(error)
    gating = text.get("scoring_func")
    return ConfigReading(
        name=name,
        sizes=sizes,
        format=weight_format,
        gating=gating if isinstance(gating, str) and gating.isidentifier() else "softmax",
        problems=problems,
        notes=tuple(notes),
    )


def _load(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; reads at most MAX_CONFIG_BYTES, and regular files only (a pipe would hang)."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path} is not a file; give the model's config.json")
        if found.st_size > MAX_CONFIG_BYTES:
            raise UsageError(f"{path} has {found.st_size:,} bytes; a config.json has at most {MAX_CONFIG_BYTES:,}")
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text; give the model's config.json") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is not valid JSON: {str(error)[:100]}") from None
    config = as_object(value)
    if config is None:
        raise UsageError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return config


def _text_model(top: dict[str, Any]) -> dict[str, Any]:
    """Return the object that carries the MoE fields: the top level, or the text model of a multimodal config."""
    candidates = [top]
    for keys in _TEXT_MODELS:
        inner: dict[str, Any] | None = top
        for key in keys:
            inner = as_object(inner.get(key)) if inner is not None else None
        if inner is not None:
            candidates.append(inner)
    with_experts = [one for one in candidates if any(one.get(field) is not None for field in NAMES["experts"])]
    return (with_experts or candidates)[0]


def _architecture(top: dict[str, Any], text: dict[str, Any]) -> str:
    """Return the architecture's name, the model type, or ``this model``: only plain words reach a terminal."""
    for config in (top, text):
        for field in ("architectures", "model_type"):
            name = _first(config.get(field))
            if isinstance(name, str) and name.isidentifier() and len(name) <= 80:
                return name
    return "this model"


def _first(value: Any) -> Any:
    """Return the first item of a JSON list, or the value itself."""
    if not isinstance(value, list):
        return value
    items = cast("list[Any]", value)
    return items[0] if items else None


def _read_size(size: str, text: dict[str, Any], name: str, notes: list[str]) -> int:
    """Return one size, checked; where two fields disagree the first wins and a note says so."""
    found = {field: text[field] for field in NAMES[size] if text.get(field) is not None}
    if size == "inter":
        found |= _dense_width(text, name, has_own=bool(found))
    if not found:
        tried = ", ".join(NAMES[size])
        raise UsageError(
            f"{name} has none of the fields {tried}, so its {_flag(size)} is not known; give {_flag(size)}"
        )
    field, value = next(iter(found.items()))
    if type(value) is not int or not 1 <= value <= LIMITS[size]:
        raise UsageError(
            f"{field} must be a whole number from 1 to {LIMITS[size]}, got {_show(value)}; give {_flag(size)} to override it"
        )
    others = [f"{other}={_show(it)}" for other, it in found.items() if it != value]
    if others:
        notes.append(f"{field}={value} and {', '.join(others)} disagree; used {field} ({_flag(size)} overrides it)")
    return value


def _dense_width(text: dict[str, Any], name: str, *, has_own: bool) -> dict[str, Any]:
    """Return ``intermediate_size`` where it may be an expert's width, or beside the experts' own field (to compare)."""
    if text.get(_DENSE_WIDTH) is None:
        return {}
    meant = {name, text.get("model_type") if isinstance(text.get("model_type"), str) else None}
    if not has_own and not meant & _DENSE_WIDTH_IS_EXPERT_WIDTH:
        raise UsageError(
            f"{name} has no moe_intermediate_size, and moetune does not know whether its intermediate_size is an "
            "expert's width; give --inter"
        )
    return {_DENSE_WIDTH: text[_DENSE_WIDTH]}


def _unsupported(text: dict[str, Any], name: str) -> dict[str, str]:
    """Return what makes the layer another one than the kernels run: a latent width, or an ungated activation."""
    problems: dict[str, str] = {}
    latent = next((field for field in _ROUTED_WIDTH if text.get(field) is not None), None)
    if latent is not None:
        problems["hidden"] = f"{name} routes in a width of its own ({latent}); give --hidden with that width"
    act = next(
        (text[field] for field in ("hidden_act", "mlp_hidden_act", "hidden_activation") if text.get(field)), "silu"
    )
    if act not in _SILU:
        problems["activation"] = (
            f"{name} uses the activation {_show(act)}, the kernels run gated silu only; "
            "to tune its sizes all the same give --hidden --inter --experts --top-k without --config"
        )
    return problems


def _flag(size: str) -> str:
    return "--" + size.replace("_", "-")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
