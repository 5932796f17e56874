"""``moetune sweep``: tune one layer and write its table."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetune.cli.limit_options import MaxRegistersOpt, MaxSmemOpt, SpaceOpt, StructuresOpt, parse_limits
from moetune.cli.options import (
    ALL_DEVICES,
    LOCAL_OPTIONS,
    SWEEP_TOKENS,
    ConfigOpt,
    DevicesOpt,
    EpOpt,
    ExpertsOpt,
    FormatOpt,
    HiddenOpt,
    InterOpt,
    ModelOpt,
    RoutingOpt,
    TargetOpt,
    TopKOpt,
    TpOpt,
    command_line,
    given_path,
    output_dir,
    output_file,
    parse_budget,
    parse_devices,
    parse_noise,
    parse_target,
    parse_tokens,
    resolve,
)
from moetune.cli.output import out
from moetune.cli.sweep_progress import how_many_ended
from moetune.cli.target import compile_for_target
from moetune.errors import UsageError
from moetune.models.resolve import ShapeRequest
from moetune.models.routing import parse_routing

if TYPE_CHECKING:
    from moetune.tuning import SweepResult

SHORT_LADDER = f"{SWEEP_TOKENS[:5]},...,{SWEEP_TOKENS.rpartition(',')[2]}"  # whole, it would fill the help page
_SEARCH, _FILES = "How to search", "Files"

TokensOpt = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help=f"Token counts to tune, with commas between; {SHORT_LADDER} by default.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
BudgetOpt = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Wall time to keep to; none by default.", rich_help_panel=_SEARCH),
]
NoiseOpt = Annotated[
    float,
    typer.Option(
        metavar="PERCENT",
        help="Difference under which two plans are equal and the simpler one wins.",
        rich_help_panel=_SEARCH,
    ),
]
FreshOpt = Annotated[bool, typer.Option("--fresh", help="Measure again what the store knows.", rich_help_panel=_SEARCH)]
StrictOpt = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Refuse a GPU that others use or that is too hot, and entries measured on one.",
        rich_help_panel=_SEARCH,
    ),
]
StrategyOpt = Annotated[
    str,
    typer.Option(metavar="NAME", help="Search to use; see `moetune strategies list`.", rich_help_panel=_SEARCH),
]
OutOpt = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        parser=given_path,
        help="Folder of the table (your own tables; ./moetune-replay without a GPU).",
        rich_help_panel=_FILES,
    ),
]
StoreOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=given_path,
        envvar="MOETUNE_STORE",
        help="Trial store that a stopped sweep continues from.",
        rich_help_panel=_FILES,
    ),
]
RecordOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=given_path,
        help="Also save all trials as a recording (.jsonl.xz) to replay.",
        rich_help_panel=_FILES,
    ),
]


def sweep(
    model: ModelOpt = None,
    config: ConfigOpt = None,
    hidden: HiddenOpt = None,
    inter: InterOpt = None,
    experts: ExpertsOpt = None,
    top_k: TopKOpt = None,
    tp: TpOpt = 1,
    ep: EpOpt = 1,
    weight_format: FormatOpt = None,
    tokens: TokensOpt = SWEEP_TOKENS,
    routing: RoutingOpt = "uniform",
    budget: BudgetOpt = None,
    noise: NoiseOpt = 0.5,
    strict: StrictOpt = False,
    device: DevicesOpt = ALL_DEVICES,
    target: TargetOpt = None,
    max_smem: MaxSmemOpt = None,
    max_registers: MaxRegistersOpt = None,
    structures: StructuresOpt = None,
    space: SpaceOpt = None,
    fresh: FreshOpt = False,
    strategy: StrategyOpt = "guided",
    out_dir: OutOpt = None,
    store: StoreOpt = None,
    record: RecordOpt = None,
) -> None:
    """Tune a layer on this GPU and write the table that the runtime loads; without a GPU, replay recorded trials.

    Example: moetune sweep --model qwen3-30b-a3b --budget 240
    """
    layer = resolve(ShapeRequest(model, config, hidden, inter, experts, top_k, tp, ep, weight_format))
    counts, budget_s, absent = parse_tokens(tokens), parse_budget(budget), parse_target(target)
    limits = parse_limits(max_smem, max_registers, structures, space)
    first, beside = parse_devices(device)
    if absent is not None:
        if out_dir or record or routing != "uniform":
            raise UsageError("--target compiles and writes no table; leave --out, --record and --routing away")
        compile_for_target(layer.shape, absent, counts, budget_s, limits)
        return
    run_sweep(
        shape=layer.shape,
        tokens=counts,
        between=tokens == SWEEP_TOKENS,  # counts that somebody chose are all that the table gets
        routing=parse_routing(routing),
        noise=parse_noise(noise),
        strict=strict,
        budget_s=budget_s,
        device_index=first,
        beside=beside,
        out_dir=output_dir(out_dir),
        store_path=output_file(store, "--store"),
        fresh=fresh,
        strategy=strategy,
        model=layer.name,
        seed=0,
        command=command_line(leave_out=LOCAL_OPTIONS),
        record=output_file(record, "--record"),
        limits=limits,
    )


def run_sweep(**request: Any) -> None:
    """Run the sweep that ``request`` describes (the fields of SweepRequest), shown live, and print what it found."""
    from moetune.measure.ahead import processes_ahead

    with processes_ahead() as ahead:  # they import for seconds, so they begin before this process loads the rest
        from moetune.cli.results import legend, tuned_table
        from moetune.cli.sweep_display import sweep_display
        from moetune.tuning import SweepRequest, sweep

        gc.freeze()  # what was imported stays: no look for garbage goes through it while the GPU waits
        with sweep_display() as on_event:
            result = sweep(SweepRequest(**request), on_event, ahead)
    out.show(tuned_table(result.table.entries))
    out.result(legend(result.backend))
    for line in closing_lines(result):
        out.result(line)


def closing_lines(result: SweepResult) -> list[str]:
    """Return what stands under the results: where the table and the trials are, and what they are worth."""
    counted = ", ".join([f"{result.trials} trials", *how_many_ended(result.failures)])
    lines = [f"{counted}, kept in {result.store_path}"]
    if result.stopped_early:
        onwards = "the same command continues from the store" if result.backend == "cuda" else "give it more seconds"
        lines.append(f"The budget ended the search early; {onwards}.")
    if result.kept:
        counts = ", ".join(map(str, result.kept))
        lines.append(f"Kept from an earlier sweep with the same kernels, versions and GPU: {counts} tokens.")
    lines += between_lines(result)
    if result.backend != "cuda":
        lines.append(
            f"No GPU was used: these are recorded trials of the {result.table.device.name} (backend {result.backend})."
        )
    return [*lines, *clock_lines(result), f"table: {result.table_path}"]


def between_lines(result: SweepResult) -> list[str]:
    """Return what token counts between the entries lose; nothing where nobody looked."""
    between = [probe for probe in result.probes if probe.tokens not in result.table.entries]
    if not result.probes:
        return []
    tuned = len(result.probes) - len(between)
    if not between:
        return [f"between the entries: {tuned} token counts timed, all became entries"]
    worst = max(between, key=lambda probe: probe.loss)
    also = f", {tuned} became entries" if tuned else ""
    return [
        f"between the entries: at most {worst.loss:.1%} behind the best plan known there",
        f"({len(result.probes)} token counts timed{also}; the worst is {worst.tokens} tokens, served by {worst.serving})",
    ]


def clock_lines(result: SweepResult) -> list[str]:
    """Return what the GPU's clocks were while it was timed, and why they were held down; nothing where nobody knows."""
    clocks = result.clocks
    if clocks is None:
        return []
    at_most = f" of {clocks.sm_max_mhz}" if clocks.sm_max_mhz else ""
    known = [
        clocks.sm_mhz and f"SM {_span(clocks.sm_mhz)}{at_most} MHz",
        clocks.memory_mhz and f"memory {_span(clocks.memory_mhz)} MHz",
        clocks.temperature_c and f"{_span(clocks.temperature_c)} C",
        clocks.power_w and f"{_span(clocks.power_w)} W",
    ]
    said = ", ".join(filter(None, known))
    lines = [f"clocks: {said}"] if said else []
    for reason, counts in result.held_down.items():
        lines.append(f"{reason} in the finals of {', '.join(map(str, counts))} tokens")
    return lines


def _span(pair: tuple[float, float]) -> str:
    low, high = (f"{value:.0f}" for value in pair)
    return low if low == high else f"{low} to {high}"
