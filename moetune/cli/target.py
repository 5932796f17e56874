"""``moetune sweep --target``: compile a layer's candidates for a GPU that is not here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

from moetune.cli.output import out
from moetune.errors import RunError
from moetune.outcome import Compiled, Failed
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import MoEShape

Choice = tuple[Role, MoEKernelConfig]
CANDIDATES_PER_ROLE = 24  # about a minute in two compile workers; a live sweep compiles some 160
HEADER = (
    f"{'kernel':<8}{'structure':<12}{'tile':<12}{'warps':>5}{'depth':>6}{'registers':>10}{'spills':>7}{'smem B':>8}"
)


def compile_for_target(
    shape: MoEShape, device: DeviceInfo, tokens: Sequence[int], budget_s: float | None = None
) -> None:
    """Compile the default plans and the most promising candidates; print what the compiler says of each as it ends.

    Raises:
        RunError: nothing compiled.
    """
    from moetune.measure.offline import compile_offline

    compiled = 0
    choices = target_choices(shape, device, tokens)
    out.progress(f"compiling {len(choices)} kernels of {shape.key} for {device.name}; nothing is timed")
    out.result(HEADER)
    for (role, config), outcome in compile_offline(shape, device, within(budget_s, choices)):
        out.result(compiled_line(role, config, outcome))
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


def target_choices(shape: MoEShape, device: DeviceInfo, tokens: Sequence[int]) -> list[Choice]:
    """Return what to compile: the default plans' kernels, then candidates of both roles by turns."""
    from moetune.measure.offline import plan_choices
    from moetune.space import candidates
    from moetune_kernels.heuristic import heuristic_plan

    defaults = plan_choices(heuristic_plan(shape, count, device) for count in tokens)
    spaces = [
        [(role, config) for config in candidates(shape, device, role, tokens, limit=CANDIDATES_PER_ROLE).configs]
        for role in Role
    ]
    by_turns = [choice for choice in chain.from_iterable(zip_longest(*spaces)) if choice is not None]
    return list(dict.fromkeys([*defaults, *by_turns]))


def compiled_line(role: Role, config: MoEKernelConfig, outcome: Compiled | Failed) -> str:
    """Return one candidate's line: its launch choice, then registers, spills and shared memory, or why it has none."""
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
    choice = f"{role.value:<8}{config.structure.value:<12}{tile:<12}{config.num_warps:>5}{config.prefetch_distance:>6}"
    if isinstance(outcome, Failed):
        return f"{choice}  {outcome.kind.value}: {' '.join(outcome.reason.split())[:100]}"
    return f"{choice}{outcome.registers:>10}{outcome.spills:>7}{outcome.smem_bytes:>8}"
