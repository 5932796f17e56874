"""What a profile says: frozen values that turn into JSON as they are. Every number is a figure with its source."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from moetune.measure.parts import Part
from moetune.models.roofline import Limit
from moetune.outcome import Figure
from moetune_kernels.device import DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

if TYPE_CHECKING:
    from rich.console import RenderableType


class Kind(Enum):
    """What a kernel waits for."""

    COMPUTE = "compute-bound"
    BANDWIDTH = "bandwidth-bound"
    ISSUE = "issue-bound"
    LATENCY = "latency-bound"
    LAUNCH = "launch-bound"
    UNTIMED = "not timed"  # the analytical page: only the bound is known


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits a kernel, the number that decides, and what to try next."""

    kind: Kind
    sentence: str
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigures:
    """One part of the layer in numbers; percentages are fractions of one.

    Args:
        time_us: cold, by CUDA events; the sum over the part's launches.
        ncu_time_us: the same launches as ncu timed them; another clock, kept apart.
        bound_us: no kernel can be faster on this device's ceilings.
        flops: multiply-adds on real rows, two FLOPs each.
        flops_per_byte: those FLOPs over the DRAM bytes.
        tflops: those FLOPs over the time.
        min_bytes: what must cross DRAM when every operand is read and every result written once.
        dram_bytes: what crossed it.
        bandwidth_gbps: DRAM bytes over the time of the same launch.
        of_nominal, of_measured: bandwidth as a share of the data sheet's, and of what this device reached.
        issue_efficiency: issue slots used while an SM is active.
        issue_ceiling: what this code would show if it ran at the physical bound; above one, it cannot get there.
        tensor_activity: time in which the tensor pipe worked.
        occupancy: resident warps, of the most that fit.
        l2_bytes: bytes asked of the L2.
        bank_conflicts: shared-memory cycles lost.
        tiles: output tiles of the grouped GEMM.
        waves: tiles per place that the device has for one at a time.
        padding: rows multiplied per real row.
    """

    time_us: Figure
    ncu_time_us: Figure
    bound_us: Figure
    flops: Figure
    flops_per_byte: Figure
    tflops: Figure
    min_bytes: Figure
    dram_bytes: Figure
    bandwidth_gbps: Figure
    of_nominal: Figure
    of_measured: Figure
    issue_efficiency: Figure
    issue_ceiling: Figure
    tensor_activity: Figure
    occupancy: Figure
    l2_bytes: Figure
    bank_conflicts: Figure
    tiles: Figure
    waves: Figure
    padding: Figure

    def to_json(self) -> dict[str, Any]:
        """Return name -> ``{value, source}``."""
        return {field.name: getattr(self, field.name).to_json() for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProfile:
    """One part of the layer at one token count."""

    part: Part
    kernels: tuple[str, ...]  # names of the launched kernels, in order
    choice: str  # the config in words
    registers: int | None
    spills: int | None
    smem_bytes: int | None
    limit: Limit
    figures: KernelFigures
    bytes_note: str | None  # why counted and minimal bytes differ
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain JSON values."""
        return {
            "part": self.part.value,
            "kernels": list(self.kernels),
            "choice": self.choice,
            "registers": self.registers,
            "spills": self.spills,
            "smem_bytes": self.smem_bytes,
            "limited_by": self.limit.value,
            "figures": self.figures.to_json(),
            "bytes_note": self.bytes_note,
            "verdict": {
                "kind": self.verdict.kind.value,
                "sentence": self.verdict.sentence,
                "action": self.verdict.action,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenProfile:
    """One token count: the plan, the load that routing made, the whole layer and its parts."""

    tokens: int
    plan: LayerPlan
    plan_source: str
    touched_experts: float
    layer_time_us: Figure
    bound_us: Figure
    limit: Limit
    kernels: tuple[KernelProfile, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain JSON values."""
        return {
            "tokens": self.tokens,
            "plan": self.plan.to_json(),
            "plan_source": self.plan_source,
            "touched_experts": self.touched_experts,
            "layer_time_us": self.layer_time_us.to_json(),
            "bound_us": self.bound_us.to_json(),
            "limited_by": self.limit.value,
            "kernels": [kernel.to_json() for kernel in self.kernels],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Bytes per second and dense FLOP/s: the data sheet's (None where not listed) and this device's in this run."""

    nominal_bytes_per_s: float | None
    nominal_flops: float | None
    measured_bytes_per_s: float | None = None
    measured_flops: float | None = None

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth that bounds are computed with: measured where it was."""
        chosen = self.measured_bytes_per_s or self.nominal_bytes_per_s
        assert chosen is not None
        return chosen

    @property
    def flops(self) -> float:
        """The FLOP/s that bounds are computed with: measured where they were."""
        chosen = self.measured_flops or self.nominal_flops
        assert chosen is not None
        return chosen

    def to_json(self) -> dict[str, Any]:
        """Return the four numbers."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """The whole page."""

    shape: MoEShape
    device: DeviceInfo
    measured: bool  # False: the analytical page of a device that did not run anything
    ceilings: Ceilings
    versions: dict[str, str]
    command: str
    tokens: tuple[TokenProfile, ...]
    notes: tuple[str, ...] = ()
    counters_missing: str | None = None  # why there are no counters
    counters_fixes: tuple[str, ...] = ()  # the lines that would allow them

    def __rich__(self) -> RenderableType:
        from moetune.profiling.terminal import render

        return render(self)

    def __str__(self) -> str:
        from moetune.profiling.terminal import as_text

        return as_text(self)

    def to_json(self) -> dict[str, Any]:
        """Return the page as plain JSON values."""
        return {
            "shape": self.shape.to_json(),
            "device": self.device.to_json(),
            "measured": self.measured,
            "ceilings": self.ceilings.to_json(),
            "versions": dict(self.versions),
            "command": self.command,
            "counters_missing": self.counters_missing,
            "counters_fixes": list(self.counters_fixes),
            "notes": list(self.notes),
            "tokens": [profile.to_json() for profile in self.tokens],
        }
