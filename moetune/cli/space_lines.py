"""What a sweep says of its search space: how many candidates of how many, and why the others are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moetune.engine.events import SpaceCompiled, SpaceReady

TOP_REASONS = 3  # of those that cannot run; the rest is one number


def space_lines(space: SpaceReady) -> Iterator[str]:
    r"""Yield the lines about one GEMM before it is compiled; the first says how many of how many.

    >>> from moetune_kernels.config import Role
    >>> print(*space_lines(SpaceReady(Role.DOWN, 40, 900, {"needs N B of shared memory": 60}, duplicates=5)), sep="\n")
    down: 40 candidates of 900 that can run (60 cannot, 5 duplicates dropped)
      cannot: 60 needs N B of shared memory
    """
    cannot = sum(space.removed.values())
    duplicates = f", {space.duplicates:,} duplicates dropped" if space.duplicates else ""
    outside = sum(space.outside.values())
    inside = " inside the limits" if outside else ""
    yield f"{space.role.value}: {space.kept} candidates of {space.legal:,} that can run{inside} ({cannot:,} cannot{duplicates})"
    if outside:
        yield f"  limits: {counted(space.outside)}"
    if cannot:
        yield f"  cannot: {counted(space.removed, TOP_REASONS)}"
    if space.ceilings:
        by_size = sorted(space.ceilings.items())
        yield "  shared memory of a block: " + ", ".join(f"{count:,} up to {limit:,} B" for limit, count in by_size)


def compiled_line(space: SpaceCompiled) -> str:
    """Return the line about the candidates of one GEMM under limits once they are compiled.

    >>> from moetune_kernels.config import Role
    >>> compiled_line(SpaceCompiled(Role.DOWN, 38, {"over --max-smem 98304": 2}))
    'down: 38 compiled candidates are inside the limits (2 over --max-smem 98304)'
    """
    dropped = f" ({counted(space.outside)})" if space.outside else ""
    return f"{space.role.value}: {space.inside} compiled candidates are inside the limits{dropped}"


def counted(reasons: Mapping[str, int], most: int | None = None) -> str:
    """Return counts with their reasons, the most frequent first, and after ``most`` of them the sum of the others.

    >>> counted({"a": 1, "b": 3000, "c": 20, "d": 4}, 2)
    '3,000 b; 20 c; 5 for 2 other reasons'
    """
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    parts = [f"{count:,} {reason}" for reason, count in ordered[:most]]
    rest = ordered[len(parts) :]
    if rest:
        parts.append(f"{sum(count for _, count in rest):,} for {len(rest)} other reason{'s' * (len(rest) > 1)}")
    return "; ".join(parts)
