"""``moetune profile``: where the time of one layer goes, kernel by kernel."""

from __future__ import annotations

import json
import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from moetune.cli.options import (
    PROFILE_TOKENS,
    ConfigOpt,
    DeviceOpt,
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
    output_file,
    parse_target,
    parse_tokens,
    resolve,
)
from moetune.cli.output import out
from moetune.models.resolve import ShapeRequest
from moetune.models.routing import parse_routing


class PlanSource(Enum):
    """Which plan is profiled."""

    TUNED = "tuned"  # what the runtime would take: a table's, else the default plan
    DEFAULT = "default"  # the default plan, whatever the tables say


TokensOpt = Annotated[str, typer.Option(metavar="LIST", help="Token counts, with commas between.")]
PlanOpt = Annotated[PlanSource, typer.Option(help="The plan of the tuned table, or the default plan.")]
JsonOpt = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", parser=given_path, help="Also write all figures as JSON.")
]


def profile(
    model: ModelOpt = None,
    config: ConfigOpt = None,
    hidden: HiddenOpt = None,
    inter: InterOpt = None,
    experts: ExpertsOpt = None,
    top_k: TopKOpt = None,
    tp: TpOpt = 1,
    ep: EpOpt = 1,
    weight_format: FormatOpt = None,
    tokens: TokensOpt = PROFILE_TOKENS,
    plan: PlanOpt = PlanSource.TUNED,
    routing: RoutingOpt = "uniform",
    device: DeviceOpt = 0,
    target: TargetOpt = None,
    json_file: JsonOpt = None,
) -> None:
    """Show time, FLOPs/byte, bandwidth, issue efficiency and bound of each kernel, from counters where allowed.

    Example: moetune profile --experts 64 --top-k 2
    """
    layer = resolve(ShapeRequest(model, config, hidden, inter, experts, top_k, tp, ep, weight_format))
    counts, path = parse_tokens(tokens), output_file(json_file, "--json")
    parse_target(target)

    from moetune.profiling import PlanChoice, ProfileRequest, render
    from moetune.profiling import profile as run_profile

    choice = PlanChoice.BEST if plan is PlanSource.TUNED else PlanChoice.DEFAULT
    request = ProfileRequest(
        shape=layer.shape,
        tokens=counts,
        plan_choice=choice,
        device_index=device,
        target=target,
        routing=parse_routing(routing),
        command=command_line(),
    )
    page = run_profile(request, out.progress)
    out.show(render(page))
    if path is not None:
        write_json(page.to_json(), path)
        out.result(f"figures: {path}")


def write_json(value: dict[str, Any], path: Path) -> None:
    """Write ``value`` to ``path``, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
