"""Read the weight format of a checkpoint from the ``quantization_config`` of its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moetune.errors import UsageError
from moetune.models.json_object import as_object
from moetune_kernels.shape import WeightFormat

SCALE_BLOCK = [128, 128]  # the one block shape that the word fp8-block means

_BY_STRATEGY: Mapping[tuple[str, int, str], WeightFormat] = {
    ("float", 8, "block"): WeightFormat.FP8_BLOCK,
    ("float", 8, "channel"): WeightFormat.FP8_CHANNEL,
    ("float", 8, "tensor"): WeightFormat.FP8,
    ("int", 8, "channel"): WeightFormat.INT8,
    ("int", 8, "group"): WeightFormat.INT8,
    ("int", 4, "channel"): WeightFormat.INT4,
    ("int", 4, "group"): WeightFormat.INT4,
}


def read_format(top: Mapping[str, Any], text: Mapping[str, Any]) -> WeightFormat:
    """Return the checkpoint's format; a multimodal config keeps it at the top level, beside the text model.

    Raises:
        UsageError: a method, block or type that has no word here; never guessed.
    """
    value = top.get("quantization_config")
    if value is None:
        value = text.get("quantization_config")
    if value is None:
        dtype = text.get("dtype", text.get("torch_dtype", top.get("torch_dtype")))
        return WeightFormat.FP16 if dtype in ("float16", "fp16") else WeightFormat.BF16
    quant = as_object(value)
    if quant is None:
        raise UsageError(f"quantization_config must be an object, got {type(value).__name__}; give --format")
    method = quant.get("quant_method")
    if method == "mxfp4":
        return WeightFormat.MXFP4
    if method == "fp8":
        block = quant.get("weight_block_size")
        return WeightFormat.FP8 if block is None else _fp8_block(block)
    if method == "compressed-tensors":
        return _compressed_tensors(quant)
    raise UsageError(
        f"the quantization method {str(method)[:40]!r} is not known; give --format to name the weights' format"
    )


def _fp8_block(block: Any) -> WeightFormat:
    if block != SCALE_BLOCK:
        raise UsageError(f"fp8 scale blocks of {str(block)[:40]} are not known, only {SCALE_BLOCK}; give --format")
    return WeightFormat.FP8_BLOCK


def _compressed_tensors(quant: Mapping[str, Any]) -> WeightFormat:
    """Return the one format of all config groups."""
    groups = [as_object(group) or {} for group in (as_object(quant.get("config_groups")) or {}).values()]
    found = {_group_format(weights) for group in groups if (weights := as_object(group.get("weights"))) is not None}
    if len(found) != 1:
        raise UsageError(f"compressed-tensors config_groups name {len(found)} weight formats, not one; give --format")
    return found.pop()


def _group_format(weights: Mapping[str, Any]) -> WeightFormat:
    block = weights.get("block_structure")
    kind, bits = weights.get("type", "float"), weights.get("num_bits", 8)
    strategy = "block" if block is not None else weights.get("strategy", "tensor")
    if block is not None:
        _fp8_block(block)
    known = _BY_STRATEGY.get((str(kind), bits, str(strategy))) if type(bits) is int else None
    if known is None:
        raise UsageError(
            f"compressed-tensors weights of type {str(kind)[:20]!r}, {str(bits)[:20]} bits, are not known; give --format"
        )
    return known
