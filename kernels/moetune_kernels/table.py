"""One tuned table: the JSON format, its bounds, and which entry serves a token count.

A table is read in production, from files that anyone may have edited, so every field is checked by type and range before
it is used. A fault in the header drops the file, a fault in an entry drops that entry.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import pairwise
from math import isqrt
from typing import Any, cast

from moetune_kernels.device import DeviceInfo
from moetune_kernels.errors import MoetuneError, TableError
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MAX_TOKENS, MoEShape
from moetune_kernels.table_fields import clip, exact_fields, figure, number, pair, short, text

SCHEMA_VERSION = 1
BACKENDS = ("cuda", "replay", "offline")
MAX_TABLE_BYTES = 4 << 20  # a full table is about 40 kB; a forward must not wait for a file that is no table
MAX_ENTRIES = 512
REACH = 2  # the last entry serves up to this many times its own token count

_FIGURES = ("flops_per_byte", "bandwidth_gbps", "issue_efficiency")
_TEXTS = ("triton", "torch", "driver", "measured_at", "command")
UNIFORM = "uniform"  # the routing of tables that name none


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The plan for one token count and what it measured there.

    Args:
        tokens: T, the token count that was measured.
        serves: first and last token count that this entry is used for; holds ``tokens``.
        plan: the layer's launch choices.
        median_us: median time of the whole layer, in microseconds.
        spread_us: half the 20th to 80th percentile range of that time.
        baseline_us: the default plan's time in the same run; None where it could not run.
        bound_us: the physical bound.
        flops_per_byte: a figure, ``{value, source[, reason]}``, as are the other two.
        bandwidth_gbps: achieved DRAM bandwidth in 1e9 bytes per second.
        issue_efficiency: issued instructions per issue slot, 0 to 1.

    Raises:
        TableError: a field is out of range.
    """

    tokens: int
    serves: tuple[int, int]
    plan: LayerPlan
    median_us: float
    spread_us: float
    baseline_us: float | None
    bound_us: float
    flops_per_byte: Mapping[str, Any]
    bandwidth_gbps: Mapping[str, Any]
    issue_efficiency: Mapping[str, Any]

    def __post_init__(self) -> None:
        if type(self.tokens) is not int or not 1 <= self.tokens <= MAX_TOKENS:
            raise TableError(f"tokens must be a whole number from 1 to {MAX_TOKENS}, got {short(self.tokens)}")
        low, high = pair("serves", self.serves)
        if not 1 <= low <= self.tokens <= high <= REACH * MAX_TOKENS:
            raise TableError(f"serves must be a range around {self.tokens}, got {short(self.serves)}")
        object.__setattr__(self, "serves", (low, high))
        number("median_us", self.median_us, low=1e-3)
        number("spread_us", self.spread_us)
        number("bound_us", self.bound_us)
        if self.baseline_us is not None:
            number("baseline_us", self.baseline_us, low=1e-3)
        for name in _FIGURES:
            figure(name, getattr(self, name))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; the token count is the entry's key in the table."""
        value = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "tokens"}
        figures = {name: dict(getattr(self, name)) for name in _FIGURES}
        return value | figures | {"serves": list(self.serves), "plan": self.plan.to_json()}

    @classmethod
    def from_json(cls, key: str, value: Any) -> Entry:
        """Parse one item of ``entries``; raises MoetuneError naming the field that is wrong."""
        names = {field.name for field in fields(cls)} - {"tokens"}
        exact_fields("the entry", value, names)
        if not (len(key) <= 7 and key.isdecimal() and str(int(key)) == key):
            raise TableError(f"its key must be a token count such as 16, got {short(key)}")
        return cls(tokens=int(key), **(value | {"plan": LayerPlan.from_json(value["plan"])}))


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTable:
    """One device and one shape: an entry per token count, sorted, and what they were measured with.

    ``ceilings`` is ``{bytes_per_s, flops}`` reached in the same run; ``kernels`` is ``{version, source_sha256}``;
    ``routing`` is how tokens chose experts when it was measured, which no lookup asks for; ``faults`` are the sentences
    of what parsing dropped, empty for a sound table.

    Raises:
        TableError: a field is of the wrong type or out of range.
    """

    backend: str
    device: DeviceInfo
    shape: MoEShape
    ceilings: Mapping[str, float]
    kernels: Mapping[str, str]
    triton: str
    torch: str
    driver: str | None
    measured_at: str
    command: str
    entries: dict[int, Entry]
    routing: str = UNIFORM
    faults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise TableError(f"backend must be one of {', '.join(BACKENDS)}, got {short(self.backend)}")
        exact_fields("ceilings", self.ceilings, {"bytes_per_s", "flops"})
        for name, ceiling in self.ceilings.items():
            number(f"ceilings.{name}", ceiling)
        exact_fields("kernels", self.kernels, {"version", "source_sha256"})
        for name, value in self.kernels.items():
            text(f"kernels.{name}", value)
        for name in _TEXTS:
            if name != "driver" or self.driver is not None:
                text(name, getattr(self, name))
        text("routing", self.routing)
        if any(tokens != entry.tokens for tokens, entry in self.entries.items()):
            raise TableError("entries must be keyed by their own token counts")
        object.__setattr__(self, "entries", dict(sorted(self.entries.items())))

    def entry_for(self, tokens: int) -> Entry | None:
        """Return the entry that serves ``tokens``, or None where this table has no honest answer.

        An entry serves its own range. Past the last one that entry serves up to twice its token count; beyond that,
        below the first entry, and where a dropped entry left a hole, none does. Should ranges overlap, the entry
        nearest by ratio serves, the smaller one at a tie.
        """
        if tokens in self.entries:
            return self.entries[tokens]
        if not self.entries:
            return None
        last = self.entries[next(reversed(self.entries))]
        if last.tokens < tokens:
            return last if tokens <= REACH * last.tokens else None
        if tokens < next(iter(self.entries)):
            return None
        serving = [entry for entry in self.entries.values() if entry.serves[0] <= tokens <= entry.serves[1]]
        return min(serving, key=lambda entry: max(tokens / entry.tokens, entry.tokens / tokens), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain JSON values; ``faults`` are not part of the file."""
        header: dict[str, Any] = {name: getattr(self, name) for name in ("backend", *_TEXTS)}
        header |= {} if self.routing == UNIFORM else {"routing": self.routing}
        return header | {
            "schema_version": SCHEMA_VERSION,
            "device": self.device.to_json(),
            "shape": self.shape.to_json(),
            "ceilings": dict(self.ceilings),
            "kernels": dict(self.kernels),
            "entries": {str(tokens): entry.to_json() for tokens, entry in self.entries.items()},
        }

    @classmethod
    def parse(cls, data: bytes, where: str) -> TunedTable:
        """Parse a table's bytes; ``where`` names the file in errors. Entries that are wrong become ``faults``.

        Raises:
            TableError: the bytes are no table, or its header is wrong.
        """
        _need_bytes(data, where)
        with _blamed_on(where):
            document = _document(data)
            key = _key(document)
            known = {field.name for field in fields(cls)} - {"faults"} | {"schema_version"}
            lacking = sorted(known - {"routing"} - set(document))
            if lacking:
                raise TableError(f"the header lacks {', '.join(lacking)}")
            unknown = ", ".join(sorted(set(document) - known))
            faults = [f"the header has unknown fields: {clip(unknown)}"] if unknown else []
            entries = _entries(document["entries"], key, faults)
            plain = {name: document[name] for name in (*_TEXTS, "ceilings", "kernels")}
            plain["routing"] = document.get("routing", UNIFORM)
            return cls(
                backend=key.backend, device=key.device, shape=key.shape, entries=entries, faults=tuple(faults), **plain
            )


@dataclass(frozen=True, slots=True)
class TableKey:
    """What a table is looked up by, and who measured it."""

    backend: str
    device: DeviceInfo
    shape: MoEShape


def parse_key(data: bytes, where: str) -> TableKey:
    """Parse only what the lookup compares; raises TableError as :meth:`TunedTable.parse` does."""
    _need_bytes(data, where)
    with _blamed_on(where):
        return _key(_document(data))


def serve_ranges(tokens: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Return the range that each token count serves where no switch point was measured.

    Neighbours meet at their geometric mean, which belongs to the smaller one; the last serves up to twice its count.

    >>> serve_ranges([8, 16, 24])
    {8: (8, 11), 16: (12, 19), 24: (20, 48)}
    """
    ladder = sorted(set(tokens))
    tops = [isqrt(low * high) for low, high in pairwise(ladder)]
    tops += [REACH * count for count in ladder[-1:]]
    bottoms = [*ladder[:1], *(top + 1 for top in tops[:-1])]
    return dict(zip(ladder, zip(bottoms, tops, strict=True), strict=True))


def span_text(low: int, high: int) -> str:
    """Return a range of token counts in words.

    >>> span_text(12, 19), span_text(1, 1)
    ('12 to 19 tokens', '1 token')
    """
    if low < high:
        return f"{low} to {high} tokens"
    return f"{low} token" if low == 1 else f"{low} tokens"


def _need_bytes(data: Any, where: str) -> None:
    """Refuse what is no file's content: the caller's mistake, which no new sweep mends."""
    if not isinstance(data, bytes):
        raise TableError(f"{where}: must be given as bytes, got {type(data).__name__}; pass `path.read_bytes()`")


@contextmanager
def _blamed_on(where: str) -> Generator[None]:
    """Turn whatever parsing raises into one TableError that names the file and the fix."""
    try:
        yield
    except MoetuneError as error:
        raise TableError(f"{where}: {clip(str(error))}; make the table again with `moetune sweep`") from None
    except RecursionError:
        raise TableError(f"{where}: is nested too deeply to be a table; remove the file") from None


def _document(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_TABLE_BYTES:
        raise TableError(f"holds {len(data):,} B, a table at most {MAX_TABLE_BYTES:,} B")
    try:
        document = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique)
    except TableError:
        raise
    except ValueError as error:  # bad UTF-8, bad JSON, or an integer of thousands of digits
        raise TableError(f"is not JSON ({clip(str(error))})") from None
    if not isinstance(document, dict):
        raise TableError(f"must hold one JSON object, got {type(document).__name__}")
    return cast("dict[str, Any]", document)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        (twice, _count), *_rest = Counter(name for name, _ in pairs).most_common(1)
        raise TableError(f"has the field {short(twice)} twice")
    return value


def _key(document: dict[str, Any]) -> TableKey:
    version = document.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise TableError(f"schema_version must be {SCHEMA_VERSION}, got {short(version)}")
    backend = document.get("backend")
    if backend not in BACKENDS:
        raise TableError(f"backend must be one of {', '.join(BACKENDS)}, got {short(backend)}")
    device, shape = (document.get(name) for name in ("device", "shape"))
    return TableKey(str(backend), DeviceInfo.from_json(device or {}), MoEShape.from_json(shape or {}))


def _entries(value: Any, key: TableKey, faults: list[str]) -> dict[int, Entry]:
    """Parse every entry that is sound and can run on the table's own device; a sentence in ``faults`` for the rest."""
    items = cast("dict[str, Any]", value) if isinstance(value, dict) else None
    if items is None or len(items) > MAX_ENTRIES:
        raise TableError(f"entries must be an object of at most {MAX_ENTRIES} entries, got {short(value)}")
    if not items:
        faults.append("entries is empty: the table serves nothing")
    entries: dict[int, Entry] = {}
    for name, item in items.items():
        try:
            entry = Entry.from_json(name, item)
            reason = entry.plan.why_not(key.device, key.shape)
        except MoetuneError as error:
            reason = str(error)
        else:
            if reason is None:
                entries[entry.tokens] = entry
        if reason is not None:
            faults.append(f"entry {short(name)}: {clip(reason)}")
    return entries
