"""Recorded routings: an ``.npz`` of top-k ids, read without trusting a byte of it.

``topk_ids`` [N, K] holds whole numbers: the chosen experts of N tokens by their ids in the whole model, -1 where a slot
went nowhere. ``topk_weights`` [N, K] may stand beside it. Sizes are checked from the headers before an array is made.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import zipfile
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from moetune.errors import UsageError
from moetune_kernels.shape import MoEShape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TRACE_SUFFIX = ".npz"
IDS, WEIGHTS = "topk_ids", "topk_weights"
MAX_FILE_BYTES = 256 << 20
MAX_ROWS = 1 << 22  # 4 million tokens; a sweep draws at most 131,072 of them at once
MAX_TOP_K = 16
MAX_EXPERTS = 1024
MAX_MEMBERS = 64  # of the archive; a trace may carry more arrays than are read
DIGEST_LETTERS = 16
_HEADER_BYTES = 4096  # of an array's own header, which numpy writes in 128


@dataclass(frozen=True, slots=True, eq=False)
class TraceRows:
    """Recorded rows, sound in themselves: ids in range and no expert twice in a row. Rows of nothing but -1 are left out.

    Args:
        path: where they were read.
        digest: the first letters of the SHA-256 of the file's bytes.
        ids: [N, K] int32, ids of the whole model, -1 for a slot that went nowhere.
        weights: [N, K] float32, or None where none were recorded.
    """

    path: Path
    digest: str
    ids: NDArray[np.int32]
    weights: NDArray[np.float32] | None

    def why_not(self, shape: MoEShape) -> str | None:
        """Say why a layer cannot be routed so, or None when it can."""
        total = shape.local_experts if shape.experts is None else shape.experts
        top_k = self.ids.shape[1]
        if top_k != shape.top_k:
            return f"{self.path} records top-{top_k} choices, the layer takes top-{shape.top_k}; give a trace of this layer"
        highest = int(self.ids.max())
        if highest >= total:
            return f"{self.path} names expert {highest}, the layer has {total} (0 to {total - 1}); give a trace of this layer"
        nowhere = (self.ids < 0).sum(axis=1)
        others = total - shape.local_experts - (self.ids >= shape.local_experts).sum(axis=1)
        if bool((nowhere > others).any()):
            return (
                f"{self.path} has rows with fewer than {top_k} experts, and a router of {total} experts always picks "
                f"{top_k}, of which this rank holds {shape.local_experts}; record the ids of the whole model"
            )
        return None


def read_trace(path: Path) -> TraceRows:
    """Read a recorded routing.

    Raises:
        UsageError: the file cannot be read or is no sound trace; one sentence with the path and the reason.
    """
    with _blamed_on(path):
        data = _bytes(path)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = _members(archive)
            if IDS not in members:
                raise ValueError(f"it has no array {IDS}")
            ids = _ids(_array(archive, members[IDS], IDS, "iu"))
            weights = _array(archive, members[WEIGHTS], WEIGHTS, "f") if WEIGHTS in members else None
        return _rows(path, hashlib.sha256(data).hexdigest()[:DIGEST_LETTERS], ids, weights)


@contextmanager
def _blamed_on(path: Path) -> Generator[None]:
    """Turn whatever reading raises into one sentence that names the file."""
    try:
        yield
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"--routing {path} cannot be read ({error.strerror or error}); give an .npz trace") from None
    except (
        ValueError,
        TypeError,
        EOFError,
        KeyError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
        MemoryError,
    ) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(
            f"--routing {path} is no usable trace: {reason}; write it with numpy.savez({path.name!r}, {IDS}=...)"
        ) from None


def _bytes(path: Path) -> bytes:
    # Not blocking, or a named pipe would be waited for.
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise ValueError(f"it holds {status.st_size:,} B, a trace at most {MAX_FILE_BYTES:,} B")
        return file.read(MAX_FILE_BYTES + 1)


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    infos = archive.infolist()
    if len(infos) > MAX_MEMBERS:
        raise ValueError(f"it holds {len(infos)} arrays, at most {MAX_MEMBERS} are looked at")
    names = [info.filename.removesuffix(".npy") for info in infos]
    if len(set(names)) < len(names):
        raise ValueError("it holds two arrays of one name")
    return dict(zip(names, infos, strict=True))


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, kinds: str) -> NDArray[Any]:
    """Return one array [N, K] once its own header says that it is small, plain and of one of the ``kinds``."""
    from numpy.lib import format as npy_format

    npy = cast("Any", npy_format)  # its stubs lack half of the arguments
    largest = MAX_ROWS * MAX_TOP_K * 8
    if info.file_size > largest + _HEADER_BYTES:
        raise ValueError(f"{name} unpacks to {info.file_size:,} B, at most {largest:,} B are read")
    with archive.open(info) as file:
        data = file.read(info.file_size + 1)
    stream = io.BytesIO(data)
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{name} is written in version {version} of numpy's format, 1.0 and 2.0 are read")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read_header(stream, max_header_size=_HEADER_BYTES)
    if dtype.kind not in kinds or dtype.hasobject or dtype.itemsize > 8:
        wanted = "whole numbers" if "i" in kinds else "floating point numbers"
        raise ValueError(f"{name} must hold {wanted} of at most 64 bits, got {dtype}")
    if len(shape) != 2 or not 1 <= shape[0] <= MAX_ROWS or not 1 <= shape[1] <= MAX_TOP_K:
        raise ValueError(
            f"{name} must be [N, K] with 1 to {MAX_ROWS:,} rows and 1 to {MAX_TOP_K} columns, got {list(shape)[:6]}"
        )
    if stream.tell() + shape[0] * shape[1] * dtype.itemsize != len(data):
        raise ValueError(f"{name} holds other bytes than its header says")
    stream.seek(0)
    return npy.read_array(stream, allow_pickle=False, max_header_size=_HEADER_BYTES)


def _ids(found: NDArray[Any]) -> NDArray[np.int32]:
    import numpy as np

    # The largest first: an unsigned id beyond the signed range must not come round as -1.
    lowest, highest = int(found.min()), int(found.max())
    if lowest < -1 or highest >= MAX_EXPERTS:
        raise ValueError(f"{IDS} must be from -1 to {MAX_EXPERTS - 1}, got {lowest if lowest < -1 else highest}")
    ids = found.astype(np.int32)
    ordered = np.sort(ids, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    if twice.any():
        raise ValueError(f"row {int(twice.argmax())} of {IDS} names an expert twice")
    return ids


def _rows(path: Path, digest: str, ids: NDArray[np.int32], weights: NDArray[Any] | None) -> TraceRows:
    import numpy as np

    kept = (ids >= 0).any(axis=1)
    if not kept.any():
        raise ValueError(f"every row of {IDS} is -1")
    if weights is None:
        return TraceRows(path, digest, ids[kept], None)
    if weights.shape != ids.shape:
        raise ValueError(f"{WEIGHTS} must have the shape of {IDS}, {list(ids.shape)}, got {list(weights.shape)}")
    weights, ids = weights[kept], ids[kept]
    if not bool(np.isfinite(weights).all()) or bool((weights < 0).any()) or bool((weights > 1e6).any()):
        raise ValueError(f"{WEIGHTS} must be finite numbers from 0 to 1e6")
    return TraceRows(path, digest, ids, weights.astype(np.float32))
