"""``moetune strategies``: the searches, and how each does on recorded times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.failure import USAGE
from moetune.cli.options import given_path, named_paths, output_file, parse_tokens
from moetune.cli.output import out
from moetune.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moetune.engine.comparison import Regret, Score
    from moetune.engine.rehearsal import Truth

MOST_SEEDS = 1000

app = typer.Typer(help="List the searches, and compare them on recorded times without a GPU.")

FileArg = Annotated[
    Path,
    typer.Argument(metavar="FILE", parser=given_path, help="A recording (.jsonl.xz) of a sweep, best of all configs."),
]
SeedsOpt = Annotated[int, typer.Option(metavar="N", help="Sweeps rehearsed with each strategy, seeds 0 to N - 1.")]
TokensOpt = Annotated[
    str | None, typer.Option(metavar="LIST", help="Token counts to judge by, of those recorded; all by default.")
]
StrategiesOpt = Annotated[
    str, typer.Option("--strategies", metavar="LIST", help="Strategies to compare, with commas between.")
]
JsonOpt = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", parser=given_path, help="Write the scores there as well.")
]


@app.callback(invoke_without_command=True)
def strategies(context: typer.Context) -> None:
    """Print the help page where no command was named."""
    if context.invoked_subcommand is None:
        out.result(context.get_help())
        raise typer.Exit(USAGE)


@app.command(name="list")
def list_strategies() -> None:
    """Describe every strategy.

    Example: moetune strategies list
    """
    from moetune.strategies import ABOUT, STRATEGIES

    for name in STRATEGIES:
        out.result(f"{name:12}{ABOUT[name]}")


@app.command()
def compare(
    file: FileArg,
    seeds: SeedsOpt = 20,
    tokens: TokensOpt = None,
    names: StrategiesOpt = "guided,random",
    json_file: JsonOpt = None,
) -> None:
    """Rehearse a sweep on recorded times with each strategy: its regret against the best recorded, and its cost.

    Regret is the true time of the config that a search picks over the best recorded one. All recorded token counts are
    swept; --tokens says which are judged. The seconds come from the cost model of an H200 with 15 compile processes.

    Example: moetune strategies compare moetune/recordings/e128_h2048_i768_k8_bf16.jsonl.xz --seeds 5
    """
    if not 1 <= seeds <= MOST_SEEDS:
        raise UsageError(f"--seeds must be from 1 to {MOST_SEEDS}, got {seeds}")
    chosen = _strategies(names)
    named_paths([file], "a recording (.jsonl.xz)")
    output_file(json_file, "--json")
    from moetune.engine.comparison import compare as compare_on
    from moetune.strategies import STRATEGIES

    truth = _truth(file)
    judged = _judged(truth, tokens)
    out.note(_recorded_share(truth))
    scores = compare_on(truth, {name: STRATEGIES[name] for name in chosen}, seeds, judged, truth.tokens)
    _show(scores, truth)
    if json_file is not None:
        _write(json_file, file, truth, scores)


def _strategies(text: str) -> list[str]:
    from moetune.strategies import STRATEGIES

    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in STRATEGIES:
            raise UsageError(f"--strategies takes {', '.join(STRATEGIES)} with commas between, got {name[:40]!r}")
    return names


def _truth(file: Path) -> Truth:
    from moetune.engine.rehearsal import truth_of
    from moetune.store import load_recording

    recording = load_recording(file)
    truth = truth_of(recording.provenance.shape, recording.provenance.device, recording.trials)
    if not truth.tokens:
        raise UsageError(f"{file} has no token count at which a config of both GEMMs ran; give another recording")
    return truth


def _recorded_share(truth: Truth) -> str:
    """Say how much of the space the recording holds: regret is only against what was recorded."""
    from moetune.space.enumerate import Ground, enumerate_configs
    from moetune.space.prior import Problem
    from moetune_kernels.config import Role

    grounds = {role: Ground(Problem(truth.shape, truth.device, role), tuple(truth.tokens)) for role in Role}
    legal = {role: set(enumerate_configs(ground).configs) for role, ground in grounds.items()}
    recorded = {role: len(legal[role].intersection(truth.configs(role))) for role in Role}
    parts = (f"{recorded[role]} of {len(legal[role])} for {role.value}" for role in Role)
    return f"legal configs in the recording: {', '.join(parts)}; regret is against the best recorded"


def _judged(truth: Truth, tokens: str | None) -> Sequence[int]:
    if tokens is None:
        return truth.tokens
    judged = parse_tokens(tokens)
    missing = [count for count in judged if count not in truth.tokens]
    if missing:
        known = ",".join(map(str, truth.tokens))
        raise UsageError(f"--tokens {missing[0]} was not recorded; give some of {known}")
    return judged


def _show(scores: Sequence[Score], truth: Truth) -> None:
    from rich.table import Table

    configs = sum(len(answers) for answers in truth.answers.values()) / len(truth.answers)
    title = f"{truth.shape.key} on {truth.device.name}: {configs:.0f} recorded configs per GEMM and token count"
    sums = Table("strategy", title=title, title_justify="left")
    for heading in ("regret", "worst", "trials", "share", "kernels", "seconds"):
        sums.add_column(heading, justify="right")
    for score in scores:
        cost = (f"{score.trials:.1f}", f"{score.share:.1%}", str(score.kernels), f"{score.seconds:.0f}")
        sums.add_row(score.strategy, *_percent(score.regret), *cost)
    out.show(sums)
    counts = Table("tokens", title="regret, and the worst, per token count", title_justify="left")
    for score in scores:
        counts.add_column(score.strategy, justify="right")
        counts.add_column("worst", justify="right")
    for tokens in scores[0].by_tokens:
        counts.add_row(str(tokens), *(cell for score in scores for cell in _percent(score.by_tokens[tokens])))
    out.show(counts)


def _percent(regret: Regret) -> tuple[str, str]:
    return f"{regret.geomean:.2%}", f"{regret.worst:.2%}"


def _write(path: Path, file: Path, truth: Truth, scores: Sequence[Score]) -> None:
    import json
    import os

    from moetune.errors import RunError

    value = {
        "recording": file.name,
        "shape": truth.shape.key,
        "device": truth.device.name,
        "scores": [score.to_json() for score in scores],
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"cannot write the scores to {path}: {error.strerror}; give another file") from None
    out.result(f"scores: {path}")
