"""Which trials a page shows of one table: those of the trial stores, else of a recording that ships with moetune."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moetune.errors import MoetuneError
from moetune.reporting.facts import TrialSet
from moetune.reporting.wording import moment
from moetune.store import Store, TrialRow, default_store_path, latest, load_recording, shipped_recording
from moetune_kernels.table import TunedTable

_COMPRESSED = (".xz", ".gz")  # how recordings end; anything else is a trial store


def stores_to_read(given: Sequence[Path], notes: list[str]) -> list[Path]:
    """Return the given stores that exist, else the default one if it does."""
    if given:
        notes += [f"{path}: there is no such trial store" for path in given if not _is_file(path)]
        return [path for path in given if _is_file(path)]
    try:
        default = default_store_path()
    except RuntimeError:  # a user without a home folder has no default store
        return []
    return [default] if _is_file(default) else []


def _is_file(path: Path) -> bool:
    """Say whether there is a file that may be looked at; never raises."""
    try:
        return path.is_file()
    except OSError:
        return False


def find_trials(table: TunedTable, stores: Sequence[Path], notes: list[str]) -> TrialSet | None:
    """Return the trials of a table's device and shape from the first store that has any, else the shipped recording's.

    Args:
        table: whose trials.
        stores: trial stores and recordings, in order of preference.
        notes: gets a sentence for each store that cannot be read.
    """
    for path in stores:
        with _noted(notes):
            found = _recorded(table, path) if path.suffix in _COMPRESSED else _stored(table, path)
            if found is not None:
                return found
    with _noted(notes):
        shipped = shipped_recording(table.shape)
        return None if shipped is None else _recorded(table, shipped)
    return None


@contextmanager
def _noted(notes: list[str]) -> Iterator[None]:
    """Turn an error into a note, said once however many tables meet it."""
    try:
        yield
    except MoetuneError as error:
        if str(error) not in notes:
            notes.append(str(error))


def _stored(table: TunedTable, path: Path) -> TrialSet | None:
    with Store.to_read(path) as store:
        rows = [row for row in store.rows(table.shape, table.device, table.backend) if row.routing == table.routing]
    if not rows:
        return None
    newest = _versions(rows[-1])
    same = [row for row in rows if _versions(row) == newest]  # times of other kernels or compilers do not compare
    return TrialSet(trials=tuple(row.trial for row in latest(same)), origin=f"the trial store {path}")


def _recorded(table: TunedTable, path: Path) -> TrialSet | None:
    recording = load_recording(path)
    made_for = recording.provenance
    if (made_for.shape, made_for.device, made_for.routing) != (table.shape, table.device, table.routing):
        return None
    return TrialSet(
        trials=recording.trials, origin=f"the recording {path.name}, measured {moment(recording.measured_at)}"
    )


def _versions(row: TrialRow) -> tuple[str, ...]:
    return (row.kernels_sha256, row.triton, row.torch, row.driver)
