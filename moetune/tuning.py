"""The composition root of ``moetune sweep``: picks the backend, wires store, search and table writer together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moetune.engine.backend import Backend, Ceilings
from moetune.engine.bench import Key
from moetune.engine.budget import Budget
from moetune.engine.entries import with_ranges
from moetune.engine.events import Emit, Event, GpuAwaited, SweepStarted, TokenFailed, Warned, one_at_a_time
from moetune.engine.held_down import HeldDown
from moetune.engine.ladder import gaps
from moetune.engine.request import SweepRequest, SweepResult
from moetune.engine.schedule import POLISH_SHARE, affordable_kernels, order
from moetune.engine.session import Job, Ports, Session, SessionResult
from moetune.errors import MissingError, TableError, UsageError
from moetune.measure.ahead import Ahead
from moetune.measure.card import troubles, why_refused
from moetune.measure.gpu_choice import HeldGpus, held_gpus
from moetune.measure.gpu_device import driver_device
from moetune.measure.gpu_device import gpu_is_there as _gpu_is_there
from moetune.measure.gpu_messages import GpuSettings
from moetune.measure.gpu_name import Gpu, gpu_of
from moetune.measure.isolated import IsolatedBackend, open_isolated
from moetune.measure.replay import ReplayBackend
from moetune.models.routing import why_not_of
from moetune.outcome import ClockSpan, Trial, over_all
from moetune.space import reports_of
from moetune.store import (
    Provenance,
    Recording,
    Run,
    Store,
    default_store_path,
    load_recording,
    lock_dirs,
    replay_commands,
    save_recording,
    shipped_recording,
)
from moetune.strategies import STRATEGIES
from moetune.tables.writer import write_table
from moetune_kernels import __version__
from moetune_kernels.config import Structure
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.kernel_hash import source_sha256
from moetune_kernels.paths import search_dirs, user_tables_dir
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MAX_TOKENS
from moetune_kernels.table import Entry, TunedTable
from moetune_kernels.table_file import read_table, table_path

__all__ = ["Bed", "SweepRequest", "SweepResult", "replay_bed", "run_on", "sweep"]

REPLAY_DIRECTORY = Path("moetune-replay")
CLOSING_SHARE = 0.03  # of the budget: process start before, and end after, what the budget counts
MOST_NOISE = 0.2
RECORDING_SUFFIXES = (".xz", ".gz")


@dataclass(frozen=True, slots=True)
class Bed:
    """A backend with what its times depend on and where its results go by default.

    ``others`` are backends of further GPUs of the same model, ``gpus`` what to call them all, the first one first, and
    ``gpu`` their UUIDs with commas between.
    """

    backend: Backend
    provenance: Provenance
    measured_at: str
    out_dir: Path
    store_path: Path
    gpu: str | None = None
    others: tuple[Backend, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def backends(self) -> tuple[Backend, ...]:
        """All of them, the first one first."""
        return (self.backend, *self.others)


@dataclass(frozen=True, slots=True)
class _Told:
    """Makes events of what is to be said of the GPUs."""

    on_event: Emit

    def waits(self, gpu: Gpu, holder: str) -> None:
        self.on_event(GpuAwaited(str(gpu), holder))

    def warns(self, text: str) -> None:
        self.on_event(Warned(text))


def sweep(request: SweepRequest, on_event: Emit = lambda _: None, ahead: Ahead | None = None) -> SweepResult:
    """Tune a layer on the GPU, or replay its recording where there is none, and write the table.

    Args:
        request: what to tune and how.
        on_event: told of everything.
        ahead: processes that import already.

    Raises:
        UsageError: the request makes no sense.
        MissingError: no GPU, and no recording of this shape; or the sweep is strict and the GPU is not idle.
        RunError: nothing could be tuned, or store, recording or table failed.
        UnsupportedDeviceError: there is no such CUDA device.
    """
    budget = Budget(None if request.budget_s is None else (1.0 - CLOSING_SHARE) * request.budget_s)
    request = _checked(request)
    if not _gpu_is_there():
        if ahead is not None:
            ahead.close()
        return _run_closing(_replay_bed(request), request, budget, on_event)
    with closing(
        _gpu_backend(request, ahead)
    ) as backend:  # its processes import for seconds, so they begin with that first
        first = gpu_of(request.device_index)
        with held_gpus(first, request.beside, lock_dirs, _Told(on_event)) as held, ExitStack() as stack:
            budget.total_s += held.waited_s  # what another sweep took is no part of this one's budget
            # Closed here too: nothing of this sweep may be on the GPU when another one gets the lock.
            stack.enter_context(closing(backend))
            others = [stack.enter_context(closing(one)) for one in _beside(backend, held)]
            bed = _gpu_bed(backend, request)
            for other in others:
                other.begin()
            uuids = [gpu.uuid for gpu in held.gpus if gpu.uuid is not None]
            names = tuple(map(str, held.gpus))
            bed = replace(bed, gpu=",".join(uuids) or None, others=tuple(others), gpus=names)
            return _run(bed, request, budget, one_at_a_time(on_event) if others else on_event)


def _beside(backend: IsolatedBackend, held: HeldGpus) -> Iterator[IsolatedBackend]:
    """Start the processes of the GPUs beside the first one."""
    for gpu in held.gpus[1:]:
        assert held.device is not None
        yield backend.beside(gpu.index, held.device)


def _run_closing(bed: Bed, request: SweepRequest, budget: Budget, on_event: Emit) -> SweepResult:
    with closing(bed.backend):
        return _run(bed, request, budget, on_event)


def _run(bed: Bed, request: SweepRequest, budget: Budget, on_event: Emit) -> SweepResult:
    for place, backend in enumerate(bed.backends):
        _look_at_the_card(backend, f"{bed.gpus[place]}: " if bed.others else "", request, on_event)
    return run_on(bed, request, budget, on_event)


def run_on(bed: Bed, request: SweepRequest, budget: Budget, on_event: Emit) -> SweepResult:
    """Run the sweep of ``request`` on a backend that is ready."""
    table = _empty_table(bed, request)
    with Store(bed.store_path) as store:
        known = _known(store, bed, request)
        run = _begun(store, bed, request)
        on_event(_started(bed, request, len(known)))
        kept = _kept(bed, table)
        reports = reports_of(store.known(bed.provenance).values()) if request.limits.any else {}
        for tokens in [tokens for tokens, entry in kept.items() if not request.limits.keep(entry.plan, reports)]:
            on_event(Warned(f"{tokens} tokens: an earlier sweep's entry leaves the table, it is not inside the limits"))
            del kept[tokens]

        def write(entries: Mapping[int, Entry], ceilings: Ceilings) -> Path:
            return write_table(_filled(table, bed, with_ranges(kept | dict(entries)), ceilings), bed.out_dir)

        held_down = HeldDown()

        def emit(event: Event) -> None:
            held_down.note(event)
            if isinstance(event, TokenFailed):
                kept.pop(event.tokens, None)  # what does not run any more is not kept either
            on_event(event)

        ports = Ports(
            journal=run,
            known=known,
            strategy=STRATEGIES[request.strategy],
            default_plan=lambda tokens: heuristic_plan(bed.backend.shape, tokens, bed.backend.device),
            write_table=write,
            emit=emit,
        )
        result = Session(bed.backend, _job(request, budget), ports, bed.others, bed.gpus).run()
        run.end()
        clocks = over_all(map(_clocks_of, bed.backends))
        if clocks is not None and clocks.warning:
            on_event(Warned(clocks.warning))
        filled = _filled(table, bed, with_ranges(kept | dict(result.entries)), bed.backend.ceilings())
        if request.record is not None:
            _record(store, bed, request, filled)
    return replace(_result(bed, result, filled), clocks=clocks, held_down=held_down.counts)


def _started(bed: Bed, request: SweepRequest, known: int) -> SweepStarted:
    backend, routing = bed.backend, bed.provenance.routing
    return SweepStarted(backend.name, backend.device, request.shape, request.tokens, bed.store_path, known, routing)


def _look_at_the_card(backend: Backend, which: str, request: SweepRequest, on_event: Emit) -> None:
    """Tell of a GPU that others use or that is throttled, or refuse it: only a live backend has one. ``which`` says which.

    A warning can wait until the GPU process is there, a refusal comes before anything is compiled.
    """

    def look() -> None:
        state = backend.card() if hasattr(backend, "card") else None  # pyright: ignore[reportAttributeAccessIssue]
        if state is None:
            return
        reason = why_refused(state) if request.strict else None
        if reason is not None:
            raise MissingError(f"--strict: {which}{reason}")
        for trouble in troubles(state):
            on_event(Warned(which + trouble))

    if request.strict or not hasattr(backend, "when_ready"):
        look()
    else:
        backend.when_ready(look)  # pyright: ignore[reportAttributeAccessIssue]


def _begun(store: Store, bed: Bed, request: SweepRequest) -> Run:
    if bed.backend.name == "replay":
        return store.begin_replay(bed.provenance, request.command)
    return store.begin(bed.provenance, request.command, bed.gpu)


def _kept(bed: Bed, table: TunedTable) -> dict[int, Entry]:
    """Return the entries of the table that this sweep writes over, where they are as good as new.

    That is: measured on this device with these kernels and versions, under this routing. A sweep of a few token counts, or one that is
    stopped, then loses none of the others. A replay keeps nothing, so that it always writes the same.
    """
    if bed.backend.name != "cuda":
        return {}
    path = table_path(bed.out_dir, table.device, table.shape)
    try:
        old = read_table(path)
    except TableError:
        return {}
    if _made_with(old) != _made_with(table):
        return {}
    return dict(old.entries) if dict(old.kernels) == _kernels_of(table, bed, old.entries) else {}


def _made_with(table: TunedTable) -> tuple[object, ...]:
    return (table.backend, table.device, table.shape, table.triton, table.torch, table.driver, table.routing)


def _clocks_of(backend: Backend) -> ClockSpan | None:
    """Return what the GPU's clocks were: only a live backend has any."""
    return backend.clocks() if hasattr(backend, "clocks") else None  # pyright: ignore[reportAttributeAccessIssue]


def _checked(request: SweepRequest) -> SweepRequest:
    tokens = tuple(sorted(set(request.tokens)))
    if not tokens or any(type(count) is not int or not 1 <= count <= MAX_TOKENS for count in tokens):
        raise UsageError(f"token counts must be whole numbers from 1 to {MAX_TOKENS}, got {request.tokens}")
    if request.strategy not in STRATEGIES:
        raise UsageError(f"strategy must be one of {', '.join(STRATEGIES)}, got {request.strategy!r}")
    if request.record is not None and request.record.suffix not in RECORDING_SUFFIXES:
        raise UsageError(f"a recording's name ends in .jsonl.xz or .jsonl.gz, got {request.record.name}")
    if not 0 <= request.noise <= MOST_NOISE:  # also refuses NaN
        raise UsageError(f"the noise must be from 0 to {MOST_NOISE:g} of a time, got {request.noise:g}")
    reason = why_not_of(request.routing, request.shape)
    if reason is not None:
        raise UsageError(reason)
    return replace(request, tokens=tokens)


def _job(request: SweepRequest, budget: Budget) -> Job:
    workers = max(len(os.sched_getaffinity(0)) - 1, 1)
    kernels = affordable_kernels(request.budget_s, workers)
    polish = int(POLISH_SHARE * kernels)
    return Job(
        tokens=request.tokens,
        budget=budget,
        kernels=kernels - polish,
        polish=polish,
        probes=len(request.tokens) - 1 if request.between else 0,
        seed=request.seed,
        noise=request.noise,
        strict=request.strict,
        limits=request.limits,
    )


def _known(store: Store, bed: Bed, request: SweepRequest) -> dict[Key, Trial]:
    """Return screenings of earlier sweeps with equal provenance; a replay takes none, its recording has them all.

    Under limits those of configs outside are left where they are: the race must not take its pace from them.
    """
    if request.fresh or bed.backend.name != "cuda":
        return {}
    return {key: trial for key, trial in store.known(bed.provenance).items() if request.limits.reuses(trial)}


# The two backends


def _gpu_backend(request: SweepRequest, ahead: Ahead | None = None) -> IsolatedBackend:
    """Start the processes of a live sweep; they touch no GPU yet. A request that cannot be served starts none."""
    device = driver_device(request.device_index)
    if device is not None:
        heuristic_plan(request.shape, 1, device)  # refuses a format or a device that no kernel runs
    settings = GpuSettings(
        shape=request.shape, device_index=request.device_index, seed=request.seed, routing=request.routing
    )
    between = [count for _, count, _ in gaps(dict.fromkeys(request.tokens))] if request.between else []
    return open_isolated(settings, device, [*order(request.tokens), *between], ahead)


def _gpu_bed(backend: IsolatedBackend, request: SweepRequest) -> Bed:
    """Let the backend use the GPU, and say what its times depend on."""
    backend.begin()
    default = heuristic_plan(request.shape, 1, backend.device)
    provenance = Provenance(
        backend=backend.name,
        shape=request.shape,
        device=backend.device,
        kernels_sha256=source_sha256(_all_structures(default)),
        triton=_version("triton"),
        torch=_version("torch"),
        driver=_driver(),
        routing=request.routing.text,
    )
    return Bed(
        backend=backend,
        provenance=provenance,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        out_dir=request.out_dir or user_tables_dir(),
        store_path=request.store_path or _default_store(),
    )


def _default_store() -> Path:
    try:
        return default_store_path()
    except RuntimeError:  # a container whose user has no passwd entry
        raise UsageError(
            "the user has no home folder to keep trials in; name a file with --store or MOETUNE_STORE"
        ) from None


def _replay_bed(request: SweepRequest) -> Bed:
    if request.record is not None:
        raise MissingError("no CUDA GPU here, so there is nothing new to record; run --record on a GPU machine")
    found = shipped_recording(request.shape)
    if found is None:
        known = " or ".join(f"`{command}`" for command in replay_commands())
        instead = f"replay a recorded layer with {known}, " if known else ""
        raise MissingError(
            f"no CUDA GPU here, and no recorded trials of {request.shape.key} to replay; {instead}run on a GPU machine, "
            "or compile for a named GPU with `moetune sweep --target sm_90`"
        )
    out_dir = request.out_dir or REPLAY_DIRECTORY
    _refuse_real_tables(out_dir)
    return replay_bed(load_recording(found), replace(request, out_dir=out_dir))


def replay_bed(recording: Recording, request: SweepRequest) -> Bed:
    """Return the bed that replays ``recording``.

    Raises:
        MissingError: the recording is of another shape or routing, or has none of the token counts asked.
    """
    made_for = recording.provenance
    backend = ReplayBackend(
        made_for.shape, made_for.device, Ceilings(**recording.ceilings), recording.bounds, recording.trials
    )
    if backend.shape != request.shape:
        raise MissingError(f"the recording is of {backend.shape.key}, asked was {request.shape.key}; sweep that shape")
    if made_for.routing != request.routing.text:
        raise MissingError(
            f"without a GPU there are only the recorded trials of {made_for.routing} routing, asked was "
            f"{request.routing.text}; leave --routing away, or run on a GPU machine"
        )
    if not set(request.tokens) & set(backend.token_counts):
        known = ",".join(map(str, backend.token_counts))
        raise MissingError(
            f"none of these token counts was recorded; without a GPU use --tokens {known} or some of them"
        )
    out_dir = request.out_dir or REPLAY_DIRECTORY
    return Bed(
        backend=backend,
        provenance=replace(recording.provenance, backend=backend.name),
        measured_at=recording.measured_at,
        out_dir=out_dir,
        store_path=request.store_path or out_dir / "trials.sqlite",
    )


def _refuse_real_tables(out_dir: Path) -> None:
    real = [folder.resolve() for folder in search_dirs()]
    if any(out_dir.resolve().is_relative_to(folder) for folder in real):
        raise UsageError(
            f"replayed tables do not go where the runtime looks for real ones ({out_dir}); name another --out"
        )


def _all_structures(plan: LayerPlan) -> list[LayerPlan]:
    """Return plans that together use every structure: stored trials go stale when any kernel file changes."""
    down = [replace(plan.down, structure=structure) for structure in (Structure.GATHER, Structure.TMA)]
    gate_up = [replace(plan.gate_up, structure=structure) for structure in Structure]
    return [replace(plan, gate_up=first, down=second) for first in gate_up for second in down]


# The table and the recording


def _empty_table(bed: Bed, request: SweepRequest) -> TunedTable:
    return TunedTable(
        backend=bed.backend.name,
        device=bed.backend.device,
        shape=request.shape,
        ceilings={"bytes_per_s": 1.0, "flops": 1.0},
        kernels={"version": __version__, "source_sha256": bed.provenance.kernels_sha256},
        triton=bed.provenance.triton,
        torch=bed.provenance.torch,
        driver=bed.provenance.driver,
        measured_at=bed.measured_at,
        command=request.command,
        entries={},
        routing=bed.provenance.routing,
    )


def _filled(table: TunedTable, bed: Bed, entries: Mapping[int, Entry], ceilings: Ceilings) -> TunedTable:
    return replace(
        table,
        entries=entries,
        kernels=_kernels_of(table, bed, entries),
        ceilings={"bytes_per_s": ceilings.bytes_per_s, "flops": ceilings.flops},
    )


def _kernels_of(table: TunedTable, bed: Bed, entries: Mapping[int, Entry]) -> dict[str, str]:
    plans = [entry.plan for entry in entries.values()]
    kernels = dict(table.kernels)
    if plans and source_sha256(_all_structures(plans[0])) == bed.provenance.kernels_sha256:
        kernels["source_sha256"] = source_sha256(plans)  # else the kernels changed since the recording: keep its hash
    return kernels


def _record(store: Store, bed: Bed, request: SweepRequest, table: TunedTable) -> None:
    assert request.record is not None
    recording = Recording(
        provenance=bed.provenance,
        ceilings=table.ceilings,
        bounds=store.bounds(bed.provenance),
        measured_at=bed.measured_at,
        command=request.command,
        trials=tuple(store.trials(bed.provenance)),
    )
    save_recording(recording, request.record)


def _result(bed: Bed, result: SessionResult, table: TunedTable) -> SweepResult:
    return SweepResult(
        table_path=result.table_path,
        table=table,
        store_path=bed.store_path,
        trials=result.trials,
        failures=Counter({kind.value: count for kind, count in result.failures.items()}),
        removed=result.removed,
        backend=bed.backend.name,
        stopped_early=result.stopped_early,
        kept=tuple(tokens for tokens in table.entries if tokens not in result.entries),
        probes=result.probes,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _driver() -> str:
    """Return the NVIDIA driver's version; NVML answers in containers that hide /proc."""
    import pynvml

    try:
        pynvml.nvmlInit()
        found = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return "unknown"
    return found.decode() if isinstance(found, bytes) else str(found)
