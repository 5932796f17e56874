"""A table and its trials as a page's section."""

from __future__ import annotations

import hashlib

from moetune.models.roofline import Work, layer_work, limit, nominal_peaks
from moetune.outcome import Figure
from moetune.reporting.facts import Point, Roof, Section, TrialSet
from moetune.reporting.tables import Located
from moetune_kernels.shape import WeightFormat
from moetune_kernels.table import Entry, TunedTable

MAX_NAME = 80  # characters of a file name; a device may be called anything
_FP8 = (WeightFormat.FP8, WeightFormat.FP8_BLOCK, WeightFormat.FP8_CHANNEL)


def assemble(located: Located, trials: TrialSet | None, taken: set[str]) -> Section:
    """Return the section of one table; its name is added to ``taken``."""
    table = located.table
    measured = _roof(table.ceilings["bytes_per_s"], table.ceilings["flops"])
    nominal = _nominal(table)
    return Section(
        name=_free_name(table, taken),
        path=str(located.path),
        backend=table.backend,
        device=table.device,
        shape=table.shape,
        measured=measured,
        nominal=nominal,
        kernels_version=table.kernels["version"],
        kernels_sha256=table.kernels["source_sha256"],
        triton=table.triton,
        torch=table.torch,
        driver=table.driver or "unknown",
        measured_at=table.measured_at,
        command=table.command,
        faults=table.faults,
        points=tuple(_point(table, entry, measured or nominal) for entry in table.entries.values()),
        trials=trials,
        routing=table.routing,
    )


def _point(table: TunedTable, entry: Entry, roof: Roof | None) -> Point:
    work = _least_work(table, entry)
    return Point(
        tokens=entry.tokens,
        serves=entry.serves,
        plan=entry.plan,
        median_us=entry.median_us,
        spread_us=entry.spread_us,
        baseline_us=entry.baseline_us,
        bound_us=entry.bound_us or None,
        flops=work.flops,
        bytes=work.bytes_min,
        limit=None if roof is None else limit(work, roof.bytes_per_s, roof.flops),
        flops_per_byte=Figure.from_json(dict(entry.flops_per_byte)),
        bandwidth_gbps=Figure.from_json(dict(entry.bandwidth_gbps)),
        issue_efficiency=Figure.from_json(dict(entry.issue_efficiency)),
    )


def _least_work(table: TunedTable, entry: Entry) -> Work:
    """Return the least work of the rows that were timed: a bound by memory says how many experts they touched.

    A bound that no number of experts explains, and one by compute, leave the expectation.
    """
    shape, tokens = table.shape, entry.tokens
    expected = layer_work(shape, tokens)
    weights = entry.bound_us * 1e-6 * table.ceilings["bytes_per_s"] - expected.activation_bytes
    touched = weights / layer_work(shape, tokens, touched_experts=1.0).weight_bytes
    if 0.99 <= touched <= shape.local_experts * 1.01:
        return layer_work(shape, tokens, touched_experts=touched)
    return expected


def _roof(bytes_per_s: float, flops: float) -> Roof | None:
    """Return the roof, or None for ceilings that no device has: nothing could be drawn under them."""
    return Roof(bytes_per_s=bytes_per_s, flops=flops) if bytes_per_s >= 1 and flops >= 1 else None


def _nominal(table: TunedTable) -> Roof | None:
    """Return the data sheet's roof. Its FLOP/s are those of 16-bit products, so fp8 products get none."""
    peaks = nominal_peaks(table.device)
    if peaks is None or table.shape.format in _FP8:
        return None
    return Roof(bytes_per_s=peaks.bytes_per_s, flops=peaks.flops)


def _free_name(table: TunedTable, taken: set[str]) -> str:
    """Return a file name's stem that says device and shape, cut and numbered where it must be."""
    full = f"{table.device.slug}_{table.shape.key}" + ("" if table.backend == "cuda" else f"_{table.backend}")
    full = full.replace("%", "x").replace("+", "p")  # safe in a file name, an id and a command line alike
    if len(full) > MAX_NAME:
        full = f"{full[: MAX_NAME - 9]}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"
    name, count = full, 1
    while name in taken:
        count += 1
        name = f"{full}_{count}"
    taken.add(name)
    return name
