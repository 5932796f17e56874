"""``moetune sweep --target``: compile a layer's candidates for a GPU that is not here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

from moetune.cli.output import out
from moetune.errors import RunError
from moetune.outcome import Compiled, Failed
from moetune.space import Limits
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import MoEShape

Choice = tuple[Role, MoEKernelConfig]
CANDIDATES_PER_ROLE = 24  # about a minute in two compile workers; a live sweep compiles some 160
HEADER = (
    f"{'kernel':<8}{'structure':<12}{'tile':<12}{'warps':>5}{'depth':>6}{'registers':>10}{'spills':>7}{'smem B':>8}"
)


def compile_for_target(
    shape: MoEShape,
    device: DeviceInfo,
    tokens: Sequence[int],
    budget_s: float | None = None,
    limits: Limits | None = None,
) -> None:
    """Compile the default plans and the most promising candidates; print what the compiler says of each as it ends.

    Raises:
        RunError: nothing compiled.
        UsageError: the limits leave nothing to compile.
    """
    from moetune.measure.offline import compile_offline
    from moetune.space import FREE

    compiled, limits = 0, limits or FREE
    choices = target_choices(shape, device, tokens, limits)
    out.progress(f"compiling {len(choices)} kernels of {shape.key} for {device.name}; nothing is timed")
    out.result(HEADER)
    for (role, config), outcome in compile_offline(shape, device, within(budget_s, choices)):
        over = limits.why_not_compiled(config, role, outcome) if isinstance(outcome, Compiled) else None
        out.result(compiled_line(role, config, outcome) + ("" if over is None else f"  {over}"))
        compiled += isinstance(outcome, Compiled)
    if not compiled:
        raise RunError(f"no kernel of {shape.key} compiled for {device.name}; the reasons stand above")


def within(budget_s: float | None, choices: Sequence[Choice]) -> Iterator[Choice]:
    """Yield ``choices`` until the budget is spent; what was handed out before is still finished."""
    started_s = time.monotonic()
    for place, choice in enumerate(choices):
        if budget_s is not None and time.monotonic() - started_s > budget_s:
            out.note(f"--budget {budget_s:g} is spent; {len(choices) - place} kernels were not compiled")
            return
        yield choice


def target_choices(shape: MoEShape, device: DeviceInfo, tokens: Sequence[int], limits: Limits) -> list[Choice]:
    """Return what to compile inside the limits: the default plans' kernels, then candidates of both roles by turns.

    Raises:
        UsageError: the limits leave nothing for a GEMM or a token count.
    """
    from moetune.measure.offline import plan_choices
    from moetune.space import candidates, require_something
    from moetune.space.left import removed_text
    from moetune_kernels.heuristic import heuristic_plan

    spaces = {role: candidates(shape, device, role, tokens, CANDIDATES_PER_ROLE, limits) for role in Role}
    require_something(spaces, tokens)
    for space in spaces.values() if limits.any else ():
        out.progress(f"{space.role.value}: inside the limits {space.legal:,}; {removed_text(space)}")
    defaults = plan_choices(heuristic_plan(shape, count, device) for count in tokens)
    allowed = [choice for choice in defaults if limits.why_not(choice[1], choice[0]) is None]
    turns = zip_longest(*([(role, config) for config in space.configs] for role, space in spaces.items()))
    by_turns = [choice for choice in chain.from_iterable(turns) if choice is not None]
    return list(dict.fromkeys([*allowed, *by_turns]))


def compiled_line(role: Role, config: MoEKernelConfig, outcome: Compiled | Failed) -> str:
    """Return one candidate's line: its launch choice, then registers, spills and shared memory, or why it has none."""
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
    choice = f"{role.value:<8}{config.structure.value:<12}{tile:<12}{config.num_warps:>5}{config.prefetch_distance:>6}"
    if isinstance(outcome, Failed):
        return f"{choice}  {outcome.kind.value}: {' '.join(outcome.reason.split())[:100]}"
    return f"{choice}{outcome.registers:>10}{outcome.spills:>7}{outcome.smem_bytes:>8}"
