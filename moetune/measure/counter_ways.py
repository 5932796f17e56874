"""The two ways to read hardware counters of launches: by CUPTI inside the worker, and by ncu around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moetune.measure import counter_rights, ncu
from moetune.measure.counter_names import LAUNCH, chip_of
from moetune.measure.counter_rights import Blocked
from moetune.measure.counters_run import CounterWay, Note
from moetune.measure.cupti import library
from moetune.measure.leashed import Ended, last_line, python, text_of
from moetune.measure.ncu_csv import LaunchRow, parse
from moetune.outcome import Failed, FailureKind
from moetune_kernels.device import DeviceInfo

NCU_WORKER = "moetune.measure.counters_worker"
CUPTI_WORKER = "moetune.measure.cupti_worker"
_LOG = "ncu.log"


class _Ncu:
    """Nsight Compute with the worker under it: it flushes the caches, counts, and prints a table when the worker ends."""

    title = "ncu"

    def blocked(self, device: DeviceInfo | None) -> Blocked | None:
        del device
        return ncu.blocked()

    def readable(self, names: Mapping[str, str]) -> dict[str, str]:
        return dict(names)

    def command(self, metrics: Sequence[str], device: DeviceInfo, folder: Path, arguments: Sequence[str]) -> list[str]:
        del device
        return ncu.command(metrics, folder / _LOG, python(NCU_WORKER, arguments))

    def rows(self, notes: Sequence[Note], folder: Path) -> list[LaunchRow]:
        del notes
        return parse(text_of(folder / _LOG))

    def explain(self, ended: Ended, notes: Sequence[Note], folder: Path) -> Failed:
        del notes
        return ncu.explain(ncu.NcuRun(text_of(folder / _LOG), ended.printed, ended.exit_code))


class _Cupti:
    """The worker alone: it calls CUPTI around each launch and notes the values with it."""

    title = "CUPTI"

    def blocked(self, device: DeviceInfo | None) -> Blocked | None:
        found = counter_rights.forbidden()
        if found is not None:
            return found
        if device is not None and device.mig is not None:
            return Blocked("CUPTI's range profiler is not used on a MIG slice")
        if library.find() is None:
            return Blocked("no libcupti is installed", ("pip install nvidia-cuda-cupti (torch for CUDA brings it)",))
        return None

    def readable(self, names: Mapping[str, str]) -> dict[str, str]:
        facts = set(LAUNCH.values())  # of the launch, not counters: ncu adds them, and no figure of a sweep needs them
        return {field: metric for field, metric in names.items() if metric not in facts}

    def command(self, metrics: Sequence[str], device: DeviceInfo, folder: Path, arguments: Sequence[str]) -> list[str]:
        del folder
        chip = chip_of(device.sm)
        assert chip is not None
        return python(CUPTI_WORKER, [*arguments, chip.value, ",".join(metrics), str(device.l2_bytes)])

    def rows(self, notes: Sequence[Note], folder: Path) -> list[LaunchRow]:
        del folder
        return [LaunchRow(note["kernel"], note["values"], 1) for note in notes if "values" in note]

    def explain(self, ended: Ended, notes: Sequence[Note], folder: Path) -> Failed:
        del folder
        refused = next((note["refused"] for note in notes if "refused" in note), None)
        if refused is not None:
            return Failed(FailureKind.RESOURCES, refused)
        said = last_line(ended.printed) or "no output"
        reason = f"the worker that calls CUPTI ended with exit code {ended.exit_code} and no counters: {said[:300]}"
        return Failed(FailureKind.LAUNCH, reason)


NCU: CounterWay = _Ncu()
CUPTI: CounterWay = _Cupti()
