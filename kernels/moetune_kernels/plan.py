"""The choices for a whole layer at one token count."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.errors import UnsupportedConfigError, shown
from moetune_kernels.shape import MoEShape

if TYPE_CHECKING:
    from moetune_kernels.device import DeviceInfo


class Routing(Enum):
    """How slots are put in expert order."""

    SORTED = "sorted"  # stable by expert; inside the router's launch at up to 64 slots


class Combine(Enum):
    """How a token's expert outputs become one row."""

    GATHER_SUM = "gather_sum"  # one float32 sum per token over its slots; deterministic


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """A layer's launch choices; gate-up and down share ``block_m`` because they share one block table.

    Raises:
        UnsupportedConfigError: a field of another type, or two configs that disagree on ``block_m``.
    """

    gate_up: MoEKernelConfig
    down: MoEKernelConfig
    routing: Routing = Routing.SORTED
    combine: Combine = Combine.GATHER_SUM
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kinds = {"gate_up": MoEKernelConfig, "down": MoEKernelConfig, "routing": Routing, "combine": Combine}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise UnsupportedConfigError(f"{name} must be a {kind.__name__}, got {shown(getattr(self, name))}")
        if self.gate_up.block_m != self.down.block_m:
            raise UnsupportedConfigError(
                f"gate_up and down must share block_m, got {self.gate_up.block_m} and {self.down.block_m}"
            )
        # Encoded once: a custom op takes a str, and torch.compile reads an attribute without tracing json.
        object.__setattr__(self, "text", json.dumps(self.to_json(), sort_keys=True))

    @property
    def block_m(self) -> int:
        """Rows per tile of both GEMMs."""
        return self.gate_up.block_m

    def config(self, role: Role) -> MoEKernelConfig:
        """Return the config of one GEMM."""
        return self.gate_up if role is Role.GATE_UP else self.down

    def why_not(self, device: DeviceInfo, shape: MoEShape) -> str | None:
        """Say why this plan cannot run, naming the kernel, or None when it can."""
        for role in Role:
            reason = self.config(role).why_not(device, shape, role)
            if reason is not None:
                return f"{role.value}: {reason}"
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return {
            "routing": self.routing.value,
            "gate_up": self.gate_up.to_json(),
            "down": self.down.to_json(),
            "combine": self.combine.value,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LayerPlan:
        """Parse what :meth:`to_json` wrote; raises UnsupportedConfigError naming the field that is wrong."""
        if not isinstance(value, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - a file may hold anything
            raise UnsupportedConfigError(f"a plan must be an object, got {type(value).__name__}")
        names = {"routing", "gate_up", "down", "combine"}
        if set(value) != names:
            unknown, missing = sorted(set(value) - names, key=str), sorted(names - set(value))
            raise UnsupportedConfigError(f"a plan has unknown fields {unknown} and lacks {missing}")
        try:
            routing, combine = Routing(value["routing"]), Combine(value["combine"])
        except ValueError as error:
            raise UnsupportedConfigError(f"plan: {error}") from None
        return cls(
            gate_up=MoEKernelConfig.from_json(value["gate_up"]),
            down=MoEKernelConfig.from_json(value["down"]),
            routing=routing,
            combine=combine,
        )


@lru_cache(maxsize=1024)
def plan_from_text(text: str) -> LayerPlan:
    """Parse :attr:`LayerPlan.text`; cached, because every forward of a compiled graph asks."""
    return LayerPlan.from_json(json.loads(text))
