"""Made-up tables and trials for the report's tests. No figure here was ever measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moetune.outcome import (
    Compiled,
    Failed,
    FailureKind,
    Figure,
    Measured,
    Outcome,
    Source,
    Stage,
    Subject,
    Trial,
)
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS, DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
H200 = TARGETS["sm_90"]
DEFAULT_SHAPE = MoEShape(hidden=4096, inter=14336, local_experts=64, top_k=2)
QWEN3_30B = MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8)
BYTES_PER_S, FLOPS = 4.26e12, 7.8e14


def flops(shape: MoEShape, tokens: int) -> float:
    """FLOPs of the three products."""
    return 6.0 * tokens * shape.top_k * shape.hidden * shape.inter


def touched_bytes(shape: MoEShape, tokens: int) -> float:
    """Bytes of the experts that an even router touches, with the activations."""
    touched = shape.local_experts * (1 - (1 - shape.top_k / shape.local_experts) ** tokens)
    return touched * shape.expert_bytes + 4.0 * tokens * shape.hidden


def bound_us(shape: MoEShape, tokens: int) -> float:
    """The larger of the two lower bounds."""
    return 1e6 * max(touched_bytes(shape, tokens) / BYTES_PER_S, flops(shape, tokens) / FLOPS)


def plan(tokens: int) -> LayerPlan:
    """A plausible plan: gather for few tokens, TMA with wide tiles for many."""
    block_m = 16 if tokens <= 64 else 64 if tokens <= 1024 else 128
    structure = Structure.GATHER if tokens <= 64 else Structure.TMA
    gate_up = MoEKernelConfig(
        structure=structure, block_m=block_m, block_n=64, block_k=64, num_warps=4, prefetch_distance=4
    )
    down = MoEKernelConfig(
        structure=structure, block_m=block_m, block_n=128, block_k=64, num_warps=8, max_registers=168, smem_size=99_328
    )
    return LayerPlan(gate_up=gate_up, down=down)


def entry(shape: MoEShape, tokens: int, *, counted: bool) -> dict[str, Any]:
    """One entry: near the bound at decode, half of it in the middle, better again at prefill."""
    bound = bound_us(shape, tokens)
    share = 0.92 if tokens <= 128 else 0.62 if tokens <= 2048 else 0.78
    median = bound / share + 9.0
    intensity = flops(shape, tokens) / touched_bytes(shape, tokens)
    bandwidth = touched_bytes(shape, tokens) / median * 1e-3
    source = "counter" if counted else "analytical"
    unavailable = {"value": None, "source": "unavailable", "reason": "counters are forbidden on this machine"}
    return {
        "serves": [tokens, tokens],
        "plan": plan(tokens).to_json(),
        "median_us": round(median, 1),
        "spread_us": round(median * 0.002, 1),
        "baseline_us": round(median * (1.04 + 0.4 * (tokens > 96) + 0.1 * (tokens % 3)), 1),
        "bound_us": round(bound, 1),
        "flops_per_byte": {"value": round(intensity * (0.9 if counted else 1), 3), "source": source},
        "bandwidth_gbps": {"value": round(bandwidth * (1.1 if counted else 1), 1), "source": source},
        "issue_efficiency": {"value": 0.11, "source": "counter"} if counted else unavailable,
    }


def table(
    shape: MoEShape = DEFAULT_SHAPE,
    device: DeviceInfo = H200,
    *,
    tokens: tuple[int, ...] = TOKENS,
    backend: str = "cuda",
    counted: bool = True,
    measured_at: str = "2026-01-02T03:04:05+00:00",
) -> dict[str, Any]:
    """A whole table, as JSON. Every serves range is filled up to the next entry."""
    entries = {str(count): entry(shape, count, counted=counted) for count in tokens}
    for count, after in zip(tokens, (*tokens[1:], tokens[-1] + 1), strict=True):
        entries[str(count)]["serves"] = [count, after - 1]
    return {
        "schema_version": 1,
        "backend": backend,
        "device": device.to_json(),
        "shape": shape.to_json(),
        "ceilings": {"bytes_per_s": BYTES_PER_S, "flops": FLOPS},
        "kernels": {"version": "0.1.0", "source_sha256": "0123456789abcdef" * 4},
        "triton": "3.6.0",
        "torch": "2.11.0",
        "driver": "580.159.04",
        "measured_at": measured_at,
        "command": f"moetune sweep --hidden {shape.hidden} --inter {shape.inter} --experts {shape.local_experts} --top-k {shape.top_k}",
        "entries": entries,
    }


def write(value: dict[str, Any], path: Path) -> Path:
    """Write a table file, parents included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def trials(shape: MoEShape = DEFAULT_SHAPE, tokens: tuple[int, ...] = (1, 16, 64, 512, 4096)) -> Iterator[Trial]:
    """A grid of tiles: wide ones win at many tokens, some fail."""
    for count in tokens:
        for role in Role:
            for block_m in (16, 32, 64, 128):
                for block_n in (32, 64, 128, 256):
                    yield _trial(shape, role, count, block_m, block_n)


def _trial(shape: MoEShape, role: Role, tokens: int, block_m: int, block_n: int) -> Trial:
    config = MoEKernelConfig(
        structure=Structure.GATHER,
        block_m=block_m,
        block_n=block_n,
        block_k=64,
        prefetch_distance=4 if role is Role.DOWN else 3,
    )
    return Trial(
        subject=Subject(role.value),
        tokens=tokens,
        choice=config,
        stage=Stage.SCREEN,
        outcome=_outcome(shape, role, tokens, block_m, block_n),
        compiled=Compiled(registers=128, spills=0, smem_bytes=65_536, block_size=config.block_size),
    )


def _outcome(shape: MoEShape, role: Role, tokens: int, block_m: int, block_n: int) -> Outcome:
    if block_m == 128 and block_n == 256:
        return Failed(FailureKind.RESOURCES, "needs 262,144 B of shared memory, the limit is 232,448 B")
    if block_m == 64 and block_n == 256 and role is Role.GATE_UP:
        return Failed(FailureKind.WRONG, "relative L2 error 0.31, at most 0.006 is a match")
    wanted = 16 if tokens <= 64 else 64 if tokens <= 1024 else 128
    off = abs(block_m.bit_length() - wanted.bit_length()) * 0.35 + abs(block_n.bit_length() - 8) * 0.12
    if off > 1.2:
        return Failed(FailureKind.SLOW, "2.9 times the best in its first launch")
    figure = Figure(1.0, Source.ANALYTICAL)
    return Measured(
        median_us=bound_us(shape, tokens) * (0.66 if role is Role.GATE_UP else 0.34) * (1.05 + off),
        spread_us=0.4,
        samples=20,
        flops_per_byte=figure,
        bandwidth_gbps=figure,
        issue_efficiency=Figure.unavailable("not counted while racing"),
    )
