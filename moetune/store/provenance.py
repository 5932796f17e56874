"""What a trial's time depends on beside its choice: shape, device, kernel files and versions."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from moetune.store.codec import MAX_TEXT, dump
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import MoEShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Trials with equal provenance may stand in for each other.

    Args:
        backend: ``cuda`` or ``replay``.
        shape: the layer.
        device: the GPU.
        kernels_sha256: hash over the kernel files.
        triton: Triton's version.
        torch: torch's version.
        driver: the GPU driver's version.
        routing: how tokens chose experts, as :class:`moetune.models.routing.Routing` spells it.
    """

    backend: str
    shape: MoEShape
    device: DeviceInfo
    kernels_sha256: str
    triton: str
    torch: str
    driver: str
    routing: str = "uniform"

    @property
    def key(self) -> str:
        """The one text that runs are compared by."""
        return dump(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; ``experts`` decides the rows per expert, so it is one of them."""
        experts = self.shape.experts or self.shape.local_experts
        value = asdict(self) | {"shape": self.shape.to_json(), "experts": experts, "device": self.device.to_json()}
        if self.routing == "uniform":
            del value["routing"]  # the one routing of all trials that were stored before there was another
        return value

    @classmethod
    def from_json(cls, value: Any) -> Provenance:
        """Parse what :meth:`to_json` wrote; raises ValueError or TypeError naming what is wrong."""
        texts = ("backend", "kernels_sha256", "triton", "torch", "driver", "routing")
        fields: dict[str, Any] = {"routing": "uniform"}
        fields |= cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        if set(fields) != {*texts, "shape", "experts", "device"}:
            raise ValueError(
                "provenance must be an object with exactly its eight fields, and routing where there is one"
            )
        for name in texts:
            if type(fields[name]) is not str or len(fields[name]) > MAX_TEXT:
                raise ValueError(f"{name} must be a text of at most {MAX_TEXT} characters")
        return cls(
            shape=replace(MoEShape.from_json(fields["shape"]), experts=fields["experts"]),
            device=DeviceInfo.from_json(fields["device"]),
            **{name: fields[name] for name in texts},
        )
