"""Trials as JSON values and back. What is read may be damaged or hostile: every field is checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict
from functools import lru_cache
from math import isfinite
from typing import Any, cast

from moetune.outcome import (
    TIME_DIGITS,
    ClockSpan,
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
from moetune_kernels.config import MoEKernelConfig
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MAX_TOKENS

Choice = MoEKernelConfig | LayerPlan | int

MAX_TEXT = 2000  # of a failure's reason; a compiler that prints its whole input must not fill the store
FIGURES = ("flops_per_byte", "bandwidth_gbps", "issue_efficiency")
MAX_ROUNDS = 1000
CLOCK_PAIRS = ("sm_mhz", "memory_mhz", "temperature_c")
MAX_READING = 1_000_000  # of megahertz, watts or degrees
MAX_REASONS, MAX_REASON = 16, 100
COMPILED_COUNTS = ("registers", "spills", "smem_bytes", "block_size")
COMPILED_OPTIONS = ("fixed_instructions", "loop_instructions")


@lru_cache(maxsize=1 << 12)  # a sweep writes most kernels down several times at each token count
def choice_text(choice: Choice) -> str:
    """Return the one spelling of a choice that rows are compared by."""
    return dump(choice if isinstance(choice, int) else choice.to_json())


@lru_cache(maxsize=1 << 12)
def compiled_text(compiled: Compiled) -> str:
    """Return a compiler's report as rows hold it."""
    return dump(asdict(compiled))


def dump(value: Any) -> str:
    """Return compact JSON with sorted keys; NaN and infinities are refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def load(text: str | bytes) -> Any:
    """Parse JSON strictly: NaN, infinities and bad UTF-8 are ValueErrors, as is a nesting too deep to be ours."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def trial_to_json(trial: Trial) -> dict[str, Any]:
    """Return the trial as plain JSON values."""
    choice = trial.choice
    return {
        "subject": trial.subject.value,
        "tokens": trial.tokens,
        "choice": choice if isinstance(choice, int) else choice.to_json(),
        "stage": trial.stage.value,
        "outcome": outcome_to_json(trial.outcome),
        "compiled": None if trial.compiled is None else asdict(trial.compiled),
        "verified": trial.verified,
    }


def trial_from_json(value: Any) -> Trial:
    """Parse what :func:`trial_to_json` wrote; raises ValueError naming what is wrong."""
    fields = _object(value, "a trial", {"subject", "tokens", "choice", "stage", "outcome", "compiled", "verified"})
    subject = Subject(fields["subject"])
    if type(fields["verified"]) is not bool:
        raise ValueError(f"verified must be true or false, got {fields['verified']!r}")
    return Trial(
        subject=subject,
        tokens=_whole(fields["tokens"], "tokens", MAX_TOKENS),
        choice=choice_from_json(subject, fields["choice"]),
        stage=Stage(fields["stage"]),
        outcome=outcome_from_json(fields["outcome"]),
        compiled=None if fields["compiled"] is None else compiled_from_json(fields["compiled"]),
        verified=fields["verified"],
    )


def choice_from_json(subject: Subject, value: Any) -> Choice:
    """Parse a choice: a plan for the layer, a block_m for routing and combine, a config for the two GEMMs."""
    if subject is Subject.LAYER:
        return LayerPlan.from_json(value)
    if subject in (Subject.ROUTING, Subject.COMBINE):
        return _whole(value, "block_m", 1 << 10)
    return MoEKernelConfig.from_json(value)


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return a measurement with its figures, or a failure's kind and reason."""
    if isinstance(outcome, Failed):
        return {"kind": outcome.kind.value, "reason": outcome.reason[:MAX_TEXT]}
    return {
        "median_us": round(outcome.median_us, 4),
        "spread_us": round(outcome.spread_us, 4),
        "samples": outcome.samples,
        "source": outcome.source.value,
        **{name: _figure_to_json(getattr(outcome, name)) for name in FIGURES},
        **({"times_us": [round(time_us, TIME_DIGITS) for time_us in outcome.times_us]} if outcome.times_us else {}),
        **({} if outcome.clocks is None else {"clocks": clocks_to_json(outcome.clocks)}),
    }


def outcome_from_json(value: Any) -> Outcome:
    """Parse what :func:`outcome_to_json` wrote; raises ValueError naming what is wrong."""
    if isinstance(value, dict) and "kind" in value:
        failed = _object(cast("Any", value), "a failure", {"kind", "reason"})
        return Failed(FailureKind(failed["kind"]), str(failed["reason"])[:MAX_TEXT])
    fields = _object(
        value, "a measurement", {"median_us", "spread_us", "samples", "source", *FIGURES}, {"times_us", "clocks"}
    )
    median_us, spread_us = _number(fields["median_us"], "median_us"), _number(fields["spread_us"], "spread_us")
    if median_us <= 0 or spread_us < 0:
        raise ValueError(f"a time must be positive, got {median_us} with a spread of {spread_us}")
    return Measured(
        median_us=median_us,
        spread_us=spread_us,
        samples=_whole(fields["samples"], "samples", 1 << 30),
        source=Source(fields["source"]),
        times_us=_times_us(fields.get("times_us", [])),
        clocks=clocks_from_json(fields["clocks"]) if "clocks" in fields else None,
        **{name: _figure_from_json(fields[name]) for name in FIGURES},
    )


def clocks_to_json(clocks: ClockSpan) -> dict[str, Any]:
    """Return what the driver said of the GPU's clocks; pairs are the lowest and the highest."""
    return {name: value for name, value in asdict(clocks).items() if value is not None}


def clocks_from_json(value: Any) -> ClockSpan:
    """Parse what :func:`clocks_to_json` wrote; raises ValueError naming what is wrong."""
    fields = _object(value, "clocks", set(), {*CLOCK_PAIRS, "power_w", "sm_max_mhz", "throttle"})
    pairs: dict[str, Any] = {name: _pair(fields[name], name) for name in (*CLOCK_PAIRS, "power_w") if name in fields}
    if any(type(item) is not int for name in CLOCK_PAIRS for item in pairs.get(name, ())):
        raise ValueError("clocks and temperatures must be whole numbers")
    reasons = fields.get("throttle")
    if reasons is not None and not _are_reasons(reasons):
        raise ValueError("throttle must be a list of a few short texts")
    return ClockSpan(
        sm_max_mhz=_whole(fields["sm_max_mhz"], "sm_max_mhz", MAX_READING) if "sm_max_mhz" in fields else None,
        throttle=None if reasons is None else tuple(reasons),
        **pairs,
    )


def _pair(value: Any, name: str) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(cast("list[Any]", value)) != 2:
        raise ValueError(f"{name} must be a lowest and a highest value")
    low, high = cast("list[Any]", value)
    if not -MAX_READING <= _number(low, name) <= _number(high, name) <= MAX_READING:
        raise ValueError(f"{name} must be a lowest and a highest value, got {low!r} and {high!r}")
    return low, high


def _are_reasons(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or len(cast("list[Any]", value)) > MAX_REASONS:
        return False
    return all(type(reason) is str and len(reason) <= MAX_REASON for reason in cast("list[Any]", value))


def compiled_from_json(value: Any) -> Compiled:
    """Parse a compiler's report; raises ValueError naming what is wrong."""
    fields = _object(value, "a compiler report", {*COMPILED_COUNTS, *COMPILED_OPTIONS, "tensor_instruction"})
    counts: dict[str, Any] = {name: _whole(fields[name], name, 1 << 40) for name in COMPILED_COUNTS}
    options: dict[str, Any] = {
        name: None if fields[name] is None else _whole(fields[name], name, 1 << 40) for name in COMPILED_OPTIONS
    }
    instruction = fields["tensor_instruction"]
    if instruction is not None and type(instruction) is not str:
        raise ValueError(f"tensor_instruction must be a text or null, got {instruction!r}")
    return Compiled(**counts, **options, tensor_instruction=instruction)


def _times_us(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or len(cast("list[Any]", value)) > MAX_ROUNDS:
        raise ValueError(f"times_us must be a list of at most {MAX_ROUNDS} times")
    times_us = tuple(_number(time_us, "a time") for time_us in cast("list[Any]", value))
    if any(time_us <= 0 for time_us in times_us):
        raise ValueError("times_us must be positive")
    return times_us


def _figure_to_json(figure: Figure) -> dict[str, Any]:
    value = figure.to_json()
    return value if figure.value is None else value | {"value": float(f"{figure.value:.6g}")}


def _figure_from_json(value: Any) -> Figure:
    figure = Figure.from_json(value)
    if figure.value is not None:
        _number(figure.value, "a figure")
    return figure


def _object(value: Any, what: str, names: set[str], optional: AbstractSet[str] = frozenset()) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object, got {type(value).__name__}")  # noqa: TRY004  one kind of error
    fields = cast("dict[str, Any]", value)
    if not names <= set(fields) <= names | optional:
        raise ValueError(
            f"{what} has unknown fields {sorted(set(fields) - names - optional)} and lacks {sorted(names - set(fields))}"
        )
    return fields


def _whole(value: Any, name: str, limit: int) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{name} must be a whole number from 0 to {limit}, got {value!r}")
    return value


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")
