"""``moetune trials``: what sweeps left in the trial store, listed, filtered and exported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.options import (
    ConfigOpt,
    EpOpt,
    ExpertsOpt,
    FormatOpt,
    HiddenOpt,
    InterOpt,
    ModelOpt,
    TopKOpt,
    TpOpt,
    given_path,
    named_paths,
    output_file,
    parse_tokens,
    resolve,
)
from moetune.cli.output import out
from moetune.errors import MissingError, UsageError
from moetune.models.resolve import ShapeRequest
from moetune.outcome import FailureKind, Subject

if TYPE_CHECKING:
    from moetune.cli.trials_source import Source
    from moetune.store import ListedTrial, TrialFilter

LINES = 20  # of trials, where nobody says how many
_WHICH, _FILES = "Which trials", "Files"


def _words(kinds: type[Enum]) -> str:
    return ", ".join(kind.value for kind in kinds)


KeyOpt = Annotated[
    str | None,
    typer.Option(
        "--shape", metavar="KEY", help="A layer as tables name it: e8_h4096_i14336_k2_bf16.", rich_help_panel=_WHICH
    ),
]
TokensOpt = Annotated[
    str | None, typer.Option(metavar="LIST", help="Token counts, with commas between.", rich_help_panel=_WHICH)
]
SubjectOpt = Annotated[
    Subject | None,
    typer.Option(metavar="PART", help=f"Of one part: {_words(Subject)}.", rich_help_panel=_WHICH),
]
FailedOpt = Annotated[
    bool, typer.Option("--failed", help="That have no time, with the reason.", rich_help_panel=_WHICH)
]
KindOpt = Annotated[
    FailureKind | None,
    typer.Option(metavar="KIND", help=f"That have no time, of a kind: {_words(FailureKind)}.", rich_help_panel=_WHICH),
]
VerifiedOpt = Annotated[bool, typer.Option("--verified", help="That matched the reference.", rich_help_panel=_WHICH)]
BestOpt = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="The N fastest of each device, token count and subject.", rich_help_panel=_WHICH
    ),
]
LimitOpt = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help=f"At most so many, the newest first ({LINES} on the screen; all of --best and --export).",
        rich_help_panel=_WHICH,
    ),
]
RunsOpt = Annotated[bool, typer.Option("--runs", help="List the runs instead.", rich_help_panel=_WHICH)]
StoreOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=given_path,
        envvar="MOETUNE_STORE",
        help="Trial store, or a recording (.jsonl.xz); your own store by default.",
        rich_help_panel=_FILES,
    ),
]
ExportOpt = Annotated[
    Path | None,
    typer.Option(
        "--export",
        metavar="FILE",
        parser=given_path,
        help="Write them to a .csv, .jsonl or .parquet file instead.",
        rich_help_panel=_FILES,
    ),
]


def trials(
    model: ModelOpt = None,
    config: ConfigOpt = None,
    hidden: HiddenOpt = None,
    inter: InterOpt = None,
    experts: ExpertsOpt = None,
    top_k: TopKOpt = None,
    tp: TpOpt = 1,
    ep: EpOpt = 1,
    weight_format: FormatOpt = None,
    shape_key: KeyOpt = None,
    tokens: TokensOpt = None,
    subject: SubjectOpt = None,
    failed: FailedOpt = False,
    kind: KindOpt = None,
    verified: VerifiedOpt = False,
    best: BestOpt = None,
    limit: LimitOpt = None,
    runs: RunsOpt = False,
    store: StoreOpt = None,
    export: ExportOpt = None,
) -> None:
    """List the trials of sweeps, the newest first, or export them; without a layer, of all layers.

    Example: moetune trials --model qwen3-30b-a3b --tokens 64 --best 3
    """
    from moetune.store import TrialFilter
    from moetune.store.export import check_export

    request = ShapeRequest(model, config, hidden, inter, experts, top_k, tp, ep, weight_format)
    wanted = TrialFilter(
        shape_key=_shape_key(request, shape_key),
        tokens=() if tokens is None else parse_tokens(tokens),
        subject=subject,
        failed=failed,
        kind=kind,
        verified=verified,
    )
    if best is not None and (failed or kind is not None):
        raise UsageError("--best takes trials that have a time, --failed and --kind those without; give one of them")
    if runs:
        _refuse_with_runs(wanted, best, export)
    if export is not None:
        check_export(export)
        output_file(export, "--export")
    with _source(store) as source:
        if runs:
            _show_runs(source, wanted.shape_key, limit)
        elif export is not None:
            _export(source, wanted, best, limit, export)
        else:
            _show(source, wanted, best, limit)


def _shape_key(request: ShapeRequest, shape_key: str | None) -> str | None:
    """Return the key of the layer that was named, None where none was."""
    named = request != ShapeRequest()
    if named and shape_key is not None:
        raise UsageError("--shape and the options of a layer both name one; give one of them")
    return resolve(request).shape.key if named else shape_key


@contextmanager
def _source(named: Path | None) -> Iterator[Source]:
    """Open the store or the recording that was named, else the user's own store.

    Raises:
        UsageError: what was named is not there, or is nothing that can be read.
        MissingError: no sweep has made the user's own store yet.
    """
    from moetune.cli.trials_source import open_source
    from moetune.store import RecordingError, StoreError

    if named is None:
        with open_source(_own_store()) as source:
            yield source
        return
    named_paths([named], "a trial store or a recording")
    if not named.is_file():
        raise UsageError(f"{named} is no plain file; give a trial store or a recording")
    try:
        with open_source(named) as source:
            yield source
    except (StoreError, RecordingError) as error:
        raise UsageError(str(error)) from error  # bad input, which the user named


def _own_store() -> Path:
    from moetune.store import default_store_path

    try:
        path = default_store_path()
    except RuntimeError:  # a container whose user has no passwd entry
        raise UsageError("the user has no home folder with a trial store in it; name one with --store") from None
    if not path.is_file():
        raise MissingError(
            f"there is no trial store at {path} yet: run `moetune sweep` on a GPU, or name a store or a recording with "
            "--store; a replay keeps its trials beside its table, in moetune-replay/trials.sqlite"
        )
    return path


def _refuse_with_runs(wanted: TrialFilter, best: int | None, export: Path | None) -> None:
    from moetune.store import TrialFilter

    if export is not None or best is not None or wanted != TrialFilter(shape_key=wanted.shape_key):
        raise UsageError("--runs lists runs, which only a layer and --limit narrow; leave the options for trials away")


def _chosen(source: Source, wanted: TrialFilter, best: int | None, limit: int | None) -> Iterator[ListedTrial]:
    """Yield the wanted trials: the newest first, or the fastest by token count and subject."""
    from dataclasses import replace
    from itertools import islice

    from moetune.store import fastest

    if best is None:
        return islice(source.newest(wanted), limit)
    # Unverified ones too at first: a choice whose latest trial was wrong must not stand by an earlier one.
    every = source.newest(replace(wanted, verified=False))
    return islice(fastest(every, best, verified=wanted.verified), limit)


def _export(source: Source, wanted: TrialFilter, best: int | None, limit: int | None, path: Path) -> None:
    from moetune.store.export import export_trials

    count = export_trials(_chosen(source, wanted, best, limit), path)
    if not count:
        _say_why_none(source, wanted)
    out.result(f"{count} trials: {path}")


def _show(source: Source, wanted: TrialFilter, best: int | None, limit: int | None) -> None:
    from moetune.cli.trials_view import CONFIG_LEGEND, FIGURES_LEGEND, sections

    given = LINES if limit is None and best is None else limit
    shown = list(_chosen(source, wanted, best, given))
    if not shown:
        _say_why_none(source, wanted)
        return
    reasons = wanted.failed or wanted.kind is not None
    for part in sections(shown, reasons=reasons, by_run=best is None):
        out.show(part)
    out.result(CONFIG_LEGEND if reasons else f"{FIGURES_LEGEND}\n{CONFIG_LEGEND}")
    total = source.count(wanted)
    if best is not None or len(shown) == total:
        out.result(f"{len(shown)} trials from {source.path}")
    else:
        out.result(f"{len(shown)} of {total} trials from {source.path}; --limit N shows more")


def _say_why_none(source: Source, wanted: TrialFilter) -> None:
    from moetune.store import TrialFilter

    total = source.count(TrialFilter())
    if not total:
        out.note(f"{source.path} holds no trials yet")
        return
    layers = sorted({run.shape.key for run in source.runs()})
    known = "" if wanted.shape_key in (None, *layers) else f", whose layers are {', '.join(layers[:8])}"
    out.note(f"none of the {total:,} trials in {source.path} match{known}")


def _show_runs(source: Source, shape_key: str | None, limit: int | None) -> None:
    from moetune.cli.trials_view import run_sections

    found = [run for run in source.runs() if shape_key in (None, run.shape.key)][::-1]
    if not found:
        out.note(f"{source.path} holds no runs" + (f" of {shape_key}" if shape_key else " yet"))
        return
    for part in run_sections(found[:limit], source.trials_of_runs()):
        out.show(part)
    out.result(f"{len(found[:limit])} of {len(found)} runs in {source.path}; ended: no, it was stopped or still runs")
