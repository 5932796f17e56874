"""What to profile, checked once; defaults are those of ``moetune profile``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import Enum

from moetune.errors import UsageError
from moetune.models.routing import UNIFORM, Routing, why_not_of
from moetune_kernels.device import TARGETS
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MAX_TOKENS, MoEShape

DEFAULT_SHAPE = MoEShape(hidden=4096, inter=14336, local_experts=64, top_k=2)
DEFAULT_TOKENS = (1, 64, 4096)
DEFAULT_TARGET = "sm_90"


class PlanChoice(Enum):
    """Which plan a layer is profiled with, where none is given."""

    BEST = "best"  # the tuned table's, else the default plan
    DEFAULT = "default"  # the default plan, whatever the tables say


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """One page: a layer at some token counts on one device.

    Args:
        shape: the layer as one rank sees it.
        tokens: token counts, each from 1 to 131,072; duplicates are dropped.
        plan_choice: where plans come from, or one plan for all token counts.
        device_index: CUDA device, as torch counts it.
        target: a name in ``TARGETS`` (``sm_90``): the analytical page of that device, whatever GPU is here. None
            profiles the GPU, or without one shows the page of an H200.
        routing: how tokens choose experts while they are timed; an analytical page assumes uniform routing.
        command: the command line that asks for this page, printed on it; made up from the shape when empty.

    Raises:
        UsageError: a token count or target that does not exist, or a routing that this layer or page cannot have.
    """

    shape: MoEShape = DEFAULT_SHAPE
    tokens: tuple[int, ...] = DEFAULT_TOKENS
    plan_choice: PlanChoice | LayerPlan = PlanChoice.BEST
    device_index: int = 0
    target: str | None = None
    routing: Routing = UNIFORM
    command: str = ""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise UsageError("no token counts were given; give at least one, e.g. --tokens 1,64,4096")
        for count in self.tokens:
            if type(count) is not int or not 1 <= count <= MAX_TOKENS:
                raise UsageError(f"token counts must be whole numbers from 1 to {MAX_TOKENS}, got {count!r}")
        if self.target is not None and self.target not in TARGETS:
            raise UsageError(f"target must be one of {', '.join(TARGETS)}, got {self.target!r}")
        if self.target is not None and self.routing != UNIFORM:
            raise UsageError("the page of a target assumes uniform routing; leave --routing or --target away")
        reason = why_not_of(self.routing, self.shape)
        if reason is not None:
            raise UsageError(reason)
        if not self.shape.format.is_dense16:
            raise UsageError(f"the kernels run bf16 and fp16 weights so far, not {self.shape.format.value}")
        object.__setattr__(self, "tokens", tuple(dict.fromkeys(self.tokens)))
        object.__setattr__(self, "command", self.command or self._command())

    def _command(self) -> str:
        shape = self.shape
        experts = shape.local_experts if shape.experts is None else shape.experts
        flags = [
            f"--hidden {shape.hidden} --inter {shape.inter} --experts {experts} --top-k {shape.top_k}",
            f"--tokens {','.join(map(str, self.tokens))}",
        ]
        if shape.format is not DEFAULT_SHAPE.format:
            flags.append(f"--format {shape.format.value}")
        if self.target is not None:
            flags.append(f"--target {self.target}")
        if self.routing != UNIFORM:
            flags.append(f"--routing {shlex.quote(self.routing.option)}")
        if experts != shape.local_experts:
            flags.append(f"--ep {experts // shape.local_experts}")
        return "moetune profile " + " ".join(flags)
