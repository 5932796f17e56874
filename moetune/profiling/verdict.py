"""Turn a kernel's numbers into one sentence and the next thing to try. Rules in order; the first that holds speaks.

Low issue efficiency alone is no fault: a tensor instruction of Hopper keeps its pipe busy for 128 cycles and is issued
once, so a faster kernel shows a *lower* figure. What counts is the tensor pipe, then DRAM, then whether the code could
issue what the bound needs, and only then latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moetune.measure.parts import Part
from moetune.models.roofline import Limit
from moetune.profiling.page import Kind, Verdict

BUSY = 0.8  # of a ceiling: Nsight Compute's own threshold for "bound by it"
ISSUE_BUSY = 0.75  # of the issue slots; the rest goes to dependencies that no schedule hides
SMALL_US = 15.0  # under this, a launch's start and end outweigh what it moves
REREAD = 1.15  # counted over minimal bytes; below, tables, code and cache lines explain it
WASTE = 1.3  # rows multiplied per real row
FULL_WAVES = 2.0  # below, the last wave idles a good part of the device
LOW_OCCUPANCY = 0.15
DEEP_PREFETCH = 4  # stages; each more costs shared memory and hides little that four do not
CONFLICTS = 0.1  # shared-memory cycles lost per SM cycle
_GEMMS = (Part.GATE_UP, Part.DOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the rules look at; None where it is not known. Shares are fractions of one.

    ``estimated`` says that ``dram`` and ``tensor`` are computed from the least work and the time, not counted.
    ``byte_ratio`` is counted over minimal bytes; ``conflicts`` is bank conflicts per SM cycle.
    """

    part: Part
    limit: Limit
    bound_us: float
    time_us: float | None = None
    estimated: bool = False
    tensor: float | None = None
    dram: float | None = None
    issue: float | None = None
    issue_ceiling: float | None = None
    occupancy: float | None = None
    waves: float | None = None
    padding: float = 1.0
    byte_ratio: float | None = None
    conflicts: float | None = None
    spills: int | None = None
    prefetch: int | None = None


def judge(evidence: Evidence) -> Verdict:
    """Return what limits the kernel.

    Example:
        >>> judge(Evidence(part=Part.DOWN, limit=Limit.MEMORY, bound_us=90.0, time_us=100.0, dram=0.9)).kind.value
        'bandwidth-bound'
    """
    if evidence.time_us is None:
        return _untimed(evidence)
    rules = (_compute, _bandwidth, _launch, _issue)
    return next((verdict for verdict in (rule(evidence) for rule in rules) if verdict is not None), _latency(evidence))


def _untimed(evidence: Evidence) -> Verdict:
    work = "the bytes" if evidence.limit is Limit.MEMORY else "the FLOPs"
    sentence = f"{work} alone take {_us(evidence.bound_us)}"
    advice = _first((_spilling, _too_few_tiles, _padded), evidence)
    return Verdict(Kind.UNTIMED, sentence, advice or "run it on the device to see how close it comes")


def _compute(evidence: Evidence) -> Verdict | None:
    if evidence.tensor is None or evidence.tensor < BUSY:
        return None
    sentence = f"the tensor pipe works {_percent(evidence.tensor)} of the time{_guess(evidence)}"
    if evidence.padding > WASTE:
        return Verdict(Kind.COMPUTE, sentence, _waste(evidence))
    return Verdict(Kind.COMPUTE, sentence, "at its roof: only fewer FLOPs or a narrower operand type make it faster")


def _bandwidth(evidence: Evidence) -> Verdict | None:
    if evidence.dram is None or evidence.dram < BUSY:
        return None
    sentence = f"DRAM runs at {_percent(evidence.dram)} of what a large copy reaches{_guess(evidence)}"
    again = _rereading(evidence)
    if again is not None:
        return Verdict(Kind.BANDWIDTH, sentence, again)
    if evidence.part in _GEMMS:
        return Verdict(Kind.BANDWIDTH, sentence, "at its roof: only smaller weights (fp8, int4) make it faster")
    return Verdict(Kind.BANDWIDTH, sentence, "at its roof: only fusing it into a neighbour saves its bytes")


def _launch(evidence: Evidence) -> Verdict | None:
    assert evidence.time_us is not None
    if evidence.part in _GEMMS or evidence.time_us > SMALL_US:
        return None
    sentence = (
        f"{_us(evidence.time_us)}, of which its bytes need {_us(evidence.bound_us)}: starting and ending dominate"
    )
    return Verdict(Kind.LAUNCH, sentence, "nothing to tune inside it; fewer launches are what helps")


def _issue(evidence: Evidence) -> Verdict | None:
    action = "fewer instructions per byte: larger tiles, a larger block_k, or a tma structure"
    if evidence.issue_ceiling is not None and evidence.issue_ceiling > 1.0:
        sentence = f"at its bound it would issue {evidence.issue_ceiling:.1f} times what the schedulers can"
        return Verdict(Kind.ISSUE, sentence, action)
    if evidence.issue is not None and evidence.issue >= ISSUE_BUSY:
        return Verdict(Kind.ISSUE, f"{_percent(evidence.issue)} of the issue slots are used", action)
    return None


def _latency(evidence: Evidence) -> Verdict:
    named = (("tensor pipe", evidence.tensor), ("DRAM", evidence.dram))
    shares = [f"{name} {_percent(value)}" for name, value in named if value]
    both = " and ".join(shares) if shares else "no unit is busy"
    sentence = f"{both}{_guess(evidence)}: it waits, {_times(evidence)} its bound"
    rules = (_spilling, _too_few_tiles, _padded, _conflicting, _rereading, _last_wave, _shallow, _sparse)
    return Verdict(
        Kind.LATENCY, sentence, _first(rules, evidence) or "moetune sweep tries the other tiles and structures"
    )


def _spilling(evidence: Evidence) -> str | None:
    if not evidence.spills:
        return None
    return f"{evidence.spills} registers spill: fewer accumulators per thread (smaller block_n, or more warps)"


def _too_few_tiles(evidence: Evidence) -> str | None:
    if evidence.waves is None or evidence.waves >= 1:
        return None
    places = f"only {_percent(evidence.waves)} of the device's places for a tile are taken"
    return f"{places}: a smaller block_n puts more programs to work"


def _padded(evidence: Evidence) -> str | None:
    return _waste(evidence) if evidence.limit is Limit.COMPUTE and evidence.padding > WASTE else None


def _conflicting(evidence: Evidence) -> str | None:
    if evidence.conflicts is None or evidence.conflicts <= CONFLICTS:
        return None
    return (
        f"bank conflicts cost {_percent(evidence.conflicts)} of the SM's cycles: try another block_k or a tma structure"
    )


def _rereading(evidence: Evidence) -> str | None:
    if evidence.part not in _GEMMS or evidence.byte_ratio is None or evidence.byte_ratio <= REREAD:
        return None
    return f"{evidence.byte_ratio:.2f} times the least bytes cross DRAM: try a larger group_m or block_m"


def _last_wave(evidence: Evidence) -> str | None:
    if evidence.waves is None or evidence.waves >= FULL_WAVES:
        return None
    return f"{evidence.waves:.1f} waves: the last one idles much of the device; try another block_n or a tma structure"


def _shallow(evidence: Evidence) -> str | None:
    if evidence.prefetch is None or evidence.prefetch >= DEEP_PREFETCH:
        return None
    return (
        f"more loads in flight: try prefetch_distance {evidence.prefetch + 1}, or smaller tiles and more blocks per SM"
    )


def _sparse(evidence: Evidence) -> str | None:
    if evidence.occupancy is None or evidence.occupancy >= LOW_OCCUPANCY:
        return None
    return f"only {_percent(evidence.occupancy)} of the warps are resident: smaller tiles or fewer registers"


def _first(rules: Iterable[Callable[[Evidence], str | None]], evidence: Evidence) -> str | None:
    return next((action for action in (rule(evidence) for rule in rules) if action is not None), None)


def _waste(evidence: Evidence) -> str:
    return f"{evidence.padding:.1f} rows are multiplied per real row: try a smaller block_m"


def _times(evidence: Evidence) -> str:
    assert evidence.time_us is not None
    return f"{evidence.time_us / evidence.bound_us:.1f} times" if evidence.bound_us > 0 else "far above"


def _guess(evidence: Evidence) -> str:
    return " (estimated from the least work)" if evidence.estimated else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _us(value: float) -> str:
    return f"{value:,.1f} us" if value < 1000 else f"{value / 1000:,.2f} ms"
