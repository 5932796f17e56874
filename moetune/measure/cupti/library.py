"""Find libcupti, load it, and call its functions; every failure is one CuptiError with one sentence.

CUPTI is a dependency of every torch wheel for CUDA, so it is there wherever a sweep can run. It needs no
LD_LIBRARY_PATH: its own helpers lie beside it and are loaded by their paths.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from moetune.measure.counter_rights import BUSY, FORBIDDEN, CountersRefusedError
from moetune.measure.cupti.structs import ALL, Params, struct_size

DISTRIBUTIONS = ("nvidia-cuda-cupti", "nvidia-cuda-cupti-cu12")
OLDEST_VERSION = 24  # CUPTI_API_VERSION of CUDA 12.6, whose Update 2 brought the range profiler
_HELPERS = ("libnvperf_host.so", "libnvperf_target.so")
_MAPS = Path("/proc/self/maps")
_TOOLKITS = ("usr/local/cuda*/extras/CUPTI/lib64", "usr/local/cuda*/lib64", "opt/cuda/extras/CUPTI/lib64")

INSUFFICIENT_PRIVILEGES: Final = 35
_MEANINGS = {
    15: "CUPTI cannot reach the CUDA driver",
    23: "another profiler is at work in this process",
    26: BUSY,
    27: "the range profiler does not know this system or device",
    33: "this is a virtual GPU",
    INSUFFICIENT_PRIVILEGES: FORBIDDEN,
    40: f"{FORBIDDEN}: the hypervisor does not allow it",
    41: "confidential computing is on",
    43: "this is a MIG slice",
    45: "WSL has no counters",
    46: "this CUPTI is older than the chip",
}


class CuptiError(CountersRefusedError):
    """A call of CUPTI failed, or what it gave cannot be used. ``code`` is its CUptiResult where there is one."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


def find() -> Path | None:
    """Return the libcupti to use: the one that this process has loaded, else an installed one; None without any."""
    return next(_candidates(), None)


def load(path: Path | None = None) -> Cupti:
    """Load ``path``, or what :func:`find` finds, and see that it is new enough.

    Raises:
        CuptiError: there is none, it does not load, or it is older than CUDA 12.6 Update 2.
    """
    path = path or find()
    if path is None:
        raise CuptiError("no libcupti is installed: it comes with torch for CUDA, or `pip install nvidia-cuda-cupti`")
    try:
        for helper in _HELPERS:
            if (path.parent / helper).is_file():
                ctypes.CDLL(str(path.parent / helper), mode=ctypes.RTLD_GLOBAL)
        return Cupti(ctypes.CDLL(str(path)), path)
    except OSError as error:
        raise CuptiError(f"{path} does not load: {error}") from None


class Cupti:
    """A loaded libcupti.

    Args:
        library: its functions as attributes, as ctypes gives them.
        path: where it was loaded from.

    Raises:
        CuptiError: it is older than CUDA 12.6 Update 2.
    """

    def __init__(self, library: Any, path: Path) -> None:
        self._library, self.path = library, path
        self.seconds: dict[str, float] = defaultdict(float)  # spent in each function so far
        self.version = self._version()
        missing = [kind.function for kind in ALL if not hasattr(library, kind.function)]
        if self.version < OLDEST_VERSION or missing:
            lacks = f" and has no {missing[0]}" if missing else ""
            raise CuptiError(
                f"{path} is of API version {self.version}{lacks}: that of CUDA 12.6 Update 2 (version 24) or newer is needed"
            )

    def call(self, params: Params) -> None:
        """Call the function that takes ``params``, which then hold its answers.

        Raises:
            CuptiError: it did not return CUPTI_SUCCESS.
        """
        name = params.function
        code = self.status(params)
        if code:
            meaning = _MEANINGS.get(code)
            said = self._name_of(code)
            raise CuptiError(f"{name} returned {said}" if meaning is None else f"{meaning} ({name}: {said})", code)

    def status(self, params: Params) -> int:
        """Call the function that takes ``params`` and return its CUptiResult, 0 for success."""
        params.structSize = struct_size(type(params))
        begin = time.perf_counter()
        try:
            return int(getattr(self._library, params.function)(ctypes.byref(params)))
        finally:
            self.seconds[params.function] += time.perf_counter() - begin

    def _version(self) -> int:
        version = ctypes.c_uint32()
        if not hasattr(self._library, "cuptiGetVersion") or self._library.cuptiGetVersion(ctypes.byref(version)):
            raise CuptiError(f"{self.path} does not say its version")
        return version.value

    def _name_of(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuptiGetResultString(code, ctypes.byref(text)) or text.value is None:
            return f"CUptiResult {code}"
        return text.value.decode("ascii", "replace")


def _candidates() -> Iterator[Path]:
    yield from _loaded()
    yield from _in_wheels()
    spec = find_spec("torch")
    if spec is not None and spec.origin is not None:
        torch = Path(spec.origin).parent
        yield from _libraries_in(torch / "lib", *sorted((torch.parent / "nvidia").glob("*/lib")))
    yield from _libraries_in(Path(sys.prefix) / "lib")  # conda
    for pattern in _TOOLKITS:
        yield from _libraries_in(*sorted(Path("/").glob(pattern), reverse=True))


def _loaded() -> Iterator[Path]:
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        path = Path("/" + line.partition("/")[2])
        if path.name.startswith("libcupti") and path.is_file():
            yield path


def _in_wheels() -> Iterator[Path]:
    for name in DISTRIBUTIONS:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            path = Path(str(file.locate()))
            if path.name.startswith("libcupti.so") and path.is_file():
                yield path


def _libraries_in(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        for path in sorted(folder.glob("libcupti*.so*"), key=lambda path: len(path.name)):
            if path.is_file():
                yield path
