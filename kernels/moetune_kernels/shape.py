"""The shape of one Mixture-of-Experts layer: the key of every table, plan and measurement.

Dimension letters, used everywhere: T tokens, K experts per token, S = T * K slots, E local experts,
H hidden size, I intermediate size per rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from moetune_kernels.errors import ShapeError, shown

MAX_EXPERTS = 1024  # the router holds one row of logits in registers
MAX_TOP_K = 16
ORDER_SLOTS = 64  # up to here the router's one program compares all pairs of slots; at 256 pairs spill
MAX_TOKENS = 131_072
MAX_EXPERT_WEIGHTS = (1 << 31) - 1  # of one H x I matrix: kernels count inside it in 32 bits, between experts in 64
MAX_DIMENSION = 1 << 20  # far above any published model; keeps a hostile table from overflowing int32 sizes


class WeightFormat(Enum):
    """How expert weights are stored. The runtime runs ``bf16`` and ``fp16`` so far."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP8_CHANNEL = "fp8-channel"
    FP8_BLOCK = "fp8-block"
    INT8 = "int8"
    INT4 = "int4"
    MXFP4 = "mxfp4"

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of one weight, scales not counted."""
        return _BYTES_PER_WEIGHT[self]

    @property
    def is_dense16(self) -> bool:
        """Whether weights are plain 16-bit floats, which the kernels multiply as they are."""
        return self in (WeightFormat.BF16, WeightFormat.FP16)


_BYTES_PER_WEIGHT = {
    WeightFormat.BF16: 2.0,
    WeightFormat.FP16: 2.0,
    WeightFormat.FP8: 1.0,
    WeightFormat.FP8_CHANNEL: 1.0,
    WeightFormat.FP8_BLOCK: 1.0,
    WeightFormat.INT8: 1.0,
    WeightFormat.INT4: 0.5,
    WeightFormat.MXFP4: 0.5,
}

ACTIVATION_BYTES = 2  # x, h and y are bf16 or fp16


class Activation(Enum):
    """What stands between the two grouped GEMMs."""

    SWIGLU = "swiglu"  # silu(gate) * up


class W13Layout(Enum):
    """How gate and up rows share ``w13`` [E, 2I, H]."""

    GATE_THEN_UP = "gate_then_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEShape:
    """One layer as one rank sees it. Equality and hash are the table key; ``experts`` and ``gating`` only inform.

    Args:
        hidden: H, the model width.
        inter: I, the intermediate size per rank (after tensor parallelism).
        local_experts: E, the experts that this rank holds.
        top_k: K, experts per token.
        format: how the expert weights are stored.
        activation: what stands between the two GEMMs.
        w13_layout: how gate and up rows share ``w13``.
        experts: the model's expert count over all ranks; None means ``local_experts``.
        gating: how the router scores; information only.

    Raises:
        ShapeError: a size is out of range.
    """

    hidden: int
    inter: int
    local_experts: int
    top_k: int
    format: WeightFormat = WeightFormat.BF16
    activation: Activation = Activation.SWIGLU
    w13_layout: W13Layout = W13Layout.GATE_THEN_UP
    experts: int | None = field(default=None, compare=False)
    gating: str = field(default="softmax", compare=False)

    def __post_init__(self) -> None:
        for name, limit in (
            ("hidden", MAX_DIMENSION),
            ("inter", MAX_DIMENSION),
            ("local_experts", MAX_EXPERTS),
            ("top_k", MAX_TOP_K),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise ShapeError(f"{name} must be a whole number from 1 to {limit}, got {shown(value)}")
        total = self.experts if self.experts is not None else self.local_experts
        if type(total) is not int or not self.local_experts <= total <= MAX_DIMENSION:
            raise ShapeError(
                f"experts (over all ranks) must be a whole number from local_experts={self.local_experts} "
                f"to {MAX_DIMENSION}, got {shown(total)}"
            )
        if self.top_k > total:
            raise ShapeError(f"top_k={self.top_k} is more than the model's {total} experts; give top_k <= experts")
        if self.hidden * self.inter > MAX_EXPERT_WEIGHTS:
            raise ShapeError(
                f"hidden x inter must be at most {MAX_EXPERT_WEIGHTS:,}, got {self.hidden:,} x {self.inter:,}; "
                "split the experts over more ranks"
            )
        for name, kind in (("format", WeightFormat), ("activation", Activation), ("w13_layout", W13Layout)):
            if not isinstance(getattr(self, name), kind):
                raise ShapeError(f"{name} must be a {kind.__name__}, got {shown(getattr(self, name))}")

    @property
    def key(self) -> str:
        """The shape in a file name, e.g. ``e8_h4096_i14336_k2_bf16``; a suffix names what is not the default."""
        parts = [f"e{self.local_experts}", f"h{self.hidden}", f"i{self.inter}", f"k{self.top_k}", self.format.value]
        if self.activation is not Activation.SWIGLU:
            parts.append(self.activation.value)
        if self.w13_layout is not W13Layout.GATE_THEN_UP:
            parts.append(self.w13_layout.value)
        return "_".join(parts)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's two weight matrices."""
        return int(3 * self.hidden * self.inter * self.format.bytes_per_weight)

    def to_json(self) -> dict[str, Any]:
        """Return the key fields as plain JSON values."""
        return {
            "hidden": self.hidden,
            "inter": self.inter,
            "local_experts": self.local_experts,
            "top_k": self.top_k,
            "format": self.format.value,
            "activation": self.activation.value,
            "w13_layout": self.w13_layout.value,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MoEShape:
        """Parse what :meth:`to_json` wrote; raises ShapeError naming the field that is wrong."""
        fields = ("hidden", "inter", "local_experts", "top_k", "format", "activation", "w13_layout")
        if not isinstance(value, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - a file may hold anything
            raise ShapeError(f"shape must be an object, got {type(value).__name__}")
        unknown = sorted(set(value) - set(fields), key=str)
        missing = [name for name in fields if name not in value]
        if unknown or missing:
            raise ShapeError(f"shape has unknown fields {unknown} and lacks {missing}")
        enums = {"format": WeightFormat, "activation": Activation, "w13_layout": W13Layout}
        parsed: dict[str, Any] = dict(value)
        for name, kind in enums.items():
            try:
                parsed[name] = kind(value[name])
            except ValueError:
                known = ", ".join(member.value for member in kind)
                raise ShapeError(f"shape.{name} must be one of {known}, got {shown(value[name])}") from None
        return cls(**parsed)
