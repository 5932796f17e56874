"""Say why the bytes that were counted differ from the least that had to move."""

from __future__ import annotations

from dataclasses import dataclass

from moetune.measure.parts import Part
from moetune.models.roofline import Work

AGREE = 0.1  # within 10% nothing needs explaining
SMALL_BYTES = 2 << 20  # under this, code, tables and the launch's own reads are a large part


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Counted DRAM bytes of one part, beside the least work and what could explain a difference.

    Args:
        part: which part.
        read, written: counted bytes.
        work: the least work.
        output_bytes: bytes of the result.
        l2_bytes: size of the device's L2.
        blocks_per_expert: row blocks that each touched expert's weights are read for.
    """

    part: Part
    read: float
    written: float
    work: Work
    output_bytes: float
    l2_bytes: int
    blocks_per_expert: float

    @property
    def counted(self) -> float:
        """Bytes read and written."""
        return self.read + self.written

    @property
    def ratio(self) -> float | None:
        """Counted over minimal bytes; None where nothing has to move."""
        return self.counted / self.work.bytes_min if self.work.bytes_min else None


def explain_bytes(traffic: Traffic) -> str | None:
    """Return one sentence, or None where counted and minimal bytes agree within 10%."""
    ratio = traffic.ratio
    if ratio is None or abs(ratio - 1.0) <= AGREE:
        return None
    if ratio < 1.0:
        return _fewer(traffic, ratio)
    if traffic.counted < SMALL_BYTES:
        return f"{ratio:.1f} times the least, but only {_size(traffic.counted)}: code, arguments and index tables count too"
    return _more(traffic, ratio)


def _fewer(traffic: Traffic, ratio: float) -> str:
    missing = traffic.work.bytes_min - traffic.counted
    if traffic.output_bytes > traffic.written and missing <= traffic.output_bytes * (1 + AGREE):
        left = traffic.output_bytes - traffic.written
        return f"{ratio:.2f} of the least: {_size(left)} of the result still lay in the L2 when the kernel ended"
    return (
        f"{ratio:.2f} of the least: part of the input was still in the L2, or fewer experts were touched than assumed"
    )


def _more(traffic: Traffic, ratio: float) -> str:
    needed = traffic.work.bytes_min - traffic.output_bytes
    if traffic.written > traffic.output_bytes * (1 + AGREE) + SMALL_BYTES:
        extra = traffic.written - traffic.output_bytes
        return f"{ratio:.2f} times the least: {_size(extra)} more written than the result; partial lines, or spilled registers"
    weights = traffic.work.weight_bytes
    if weights and traffic.blocks_per_expert > 1.0 and traffic.read - needed > AGREE * weights:
        again = (traffic.read - needed) / weights
        return (
            f"{ratio:.2f} times the least: an expert's weights serve {traffic.blocks_per_expert:.1f} row blocks and were "
            f"read {1 + again:.1f} times, because they left the L2 ({_size(traffic.l2_bytes)}) in between"
        )
    return f"{ratio:.2f} times the least: rows are gathered once per column tile and left the L2 in between"


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"
