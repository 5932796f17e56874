"""A trial as one flat row: the columns of ``moetune trials --export``, the same for every trial and every kind of file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from enum import Enum
from typing import Any

from moetune.outcome import Compiled, Failed, Figure
from moetune.store.codec import FIGURES
from moetune.store.rows import ListedTrial, RunRow
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

Kind = type[str] | type[int] | type[float] | type[bool]
Value = str | int | float | bool | None

_RUN: dict[str, Kind] = {
    **dict.fromkeys(("run", "backend", "shape", "device"), str),
    **dict.fromkeys(("hidden", "inter", "local_experts", "experts", "top_k"), int),
    **dict.fromkeys(("format", "activation", "w13_layout", "gating"), str),
    **dict.fromkeys(("sm", "sm_count", "memory_bytes", "l2_bytes", "smem_limit"), int),
    **dict.fromkeys(
        ("mig", "gpu", "routing", "kernels_sha256", "triton", "torch", "driver", "moetune", "command"), str
    ),
    **dict.fromkeys(("run_started_at", "run_ended_at"), str),
    **dict.fromkeys(("ceiling_bytes_per_s", "ceiling_flops"), float),
}
_TRIAL: dict[str, Kind] = {
    "trial": int,
    **dict.fromkeys(("ended_at", "subject"), str),
    "tokens": int,  # empty: ended at compile, for every token count
    "stage": str,
    "verified": bool,
    **dict.fromkeys(("failure", "reason"), str),
    **dict.fromkeys(("median_us", "spread_us"), float),
    "samples": int,
    "time_source": str,
    "bound_us": float,
}
_FIGURES: dict[str, Kind] = {
    name: kind for figure in FIGURES for name, kind in ((figure, float), (f"{figure}_source", str))
}


def _kinds(made_of: type, prefix: str = "") -> dict[str, Kind]:
    """Return a column per field of a dataclass: counts as whole numbers, all else as text."""
    return {f"{prefix}{field.name}": _kind(field) for field in fields(made_of)}


def _kind(field: Field[Any]) -> Kind:
    first = str(field.type).partition(" ")[0]
    return {"int": int, "float": float, "bool": bool}.get(first, str)


_CHOICE: dict[str, Kind] = {
    **_kinds(MoEKernelConfig),
    **{name: kind for role in Role for name, kind in _kinds(MoEKernelConfig, f"{role.value}_").items()},
    **dict.fromkeys(("plan_routing", "plan_combine"), str),
}
COLUMNS: Mapping[str, Kind] = {**_TRIAL, **_FIGURES, **_kinds(Compiled), **_CHOICE, **_RUN}


def flat(listed: ListedTrial) -> dict[str, Value]:
    """Return one value per column, in order; None where the trial has none."""
    known = {**_of_trial(listed), **_of_choice(listed), **_of_run(listed.run)}
    return {name: known.get(name) for name in COLUMNS}


def _of_trial(listed: ListedTrial) -> dict[str, Value]:
    trial, outcome = listed.trial, listed.trial.outcome
    known: dict[str, Value] = {
        "trial": listed.number,
        "ended_at": listed.ended_at,
        "subject": trial.subject.value,
        "tokens": trial.tokens or None,
        "stage": trial.stage.value,
        "verified": trial.verified,
        "bound_us": listed.bound_us,
        **({} if trial.compiled is None else _values(trial.compiled)),
    }
    if isinstance(outcome, Failed):
        return known | {"failure": outcome.kind.value, "reason": outcome.reason}
    times = {"median_us": outcome.median_us, "spread_us": outcome.spread_us, "samples": outcome.samples}
    known |= times | {"time_source": outcome.source.value}
    for name in FIGURES:
        figure: Figure = getattr(outcome, name)
        known |= {name: figure.value, f"{name}_source": figure.source.value}
    return known


def _of_choice(listed: ListedTrial) -> dict[str, Value]:
    """Return a kernel's config, or a plan's block_m and both configs, or what routing was timed with."""
    choice = listed.trial.choice
    if isinstance(choice, MoEKernelConfig):
        return _values(choice)
    if isinstance(choice, LayerPlan):
        both = {name: value for role in Role for name, value in _values(choice.config(role), f"{role.value}_").items()}
        return both | {
            "block_m": choice.block_m,
            "plan_routing": choice.routing.value,
            "plan_combine": choice.combine.value,
        }
    return {"block_m": choice or None}  # combine is the same for all


def _of_run(run: RunRow) -> dict[str, Value]:
    ceilings = run.ceilings or {}
    texts = ("run", "backend", "gpu", "routing", "kernels_sha256", "triton", "torch", "driver", "moetune", "command")
    return {
        **{name: getattr(run, name) for name in texts},
        **_of_shape(run.shape),
        **{name: value for name, value in _values(run.device).items() if name != "name"},
        "device": run.device.name,
        "run_started_at": run.started_at,
        "run_ended_at": run.ended_at,
        "ceiling_bytes_per_s": ceilings.get("bytes_per_s"),
        "ceiling_flops": ceilings.get("flops"),
    }


def _of_shape(shape: MoEShape) -> dict[str, Value]:
    return {**_values(shape), "shape": shape.key, "experts": shape.experts or shape.local_experts}


def _values(value: Any, prefix: str = "") -> dict[str, Value]:
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    return {f"{prefix}{name}": item.value if isinstance(item, Enum) else item for name, item in found.items()}
