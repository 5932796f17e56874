"""Recordings: the trials of one shape on one device as compressed JSON lines, to be replayed without a GPU.

The first line is the header, every other line one trial. A recording may come from anywhere, so sizes are bounded
before anything is parsed, and nothing but JSON is read.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from moetune.models.resolve import layer_options
from moetune.outcome import Trial
from moetune.store.codec import MAX_TEXT, dump, load, trial_from_json, trial_to_json
from moetune.store.errors import RecordingError
from moetune.store.provenance import Provenance
from moetune.whole_file import write_whole
from moetune_kernels.errors import MoetuneError
from moetune_kernels.shape import MAX_TOKENS, MoEShape

FORMAT_VERSION = 1
MAX_FILE_BYTES = 16 << 20  # shipped recordings are a few hundred kilobytes each
MAX_TEXT_BYTES = 256 << 20  # a sweep of 18 token counts is about 5 MB of text
MAX_LINE_BYTES = 64 << 10
MAX_TRIALS = 500_000
DECODER_MEMORY_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20
SHIPPED_DIRECTORY = Path(__file__).parent.parent / "recordings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Recorded trials with all that a table needs to say about them.

    Args:
        provenance: shape, device, kernel files and versions.
        ceilings: ``bytes_per_s`` and ``flops`` that the device reached.
        bounds: physical bound in microseconds per token count.
        measured_at: when, ISO 8601.
        command: what recorded it.
        trials: every trial, in the order in which they ended.
    """

    provenance: Provenance
    ceilings: Mapping[str, float]
    bounds: Mapping[int, float]
    measured_at: str
    command: str
    trials: tuple[Trial, ...]


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


def save_recording(recording: Recording, path: Path) -> Path:
    """Write ``recording`` to ``path`` (``.xz`` or ``.gz`` decides how), all or nothing.

    Raises:
        RecordingError: the name has neither ending, or the file cannot be written.
    """
    lines = [_header(recording), *(trial_to_json(trial) for trial in recording.trials)]
    text = "".join(dump(line) + "\n" for line in lines).encode()
    if path.suffix == ".xz":
        data = lzma.compress(text, preset=9)
    elif path.suffix == ".gz":
        data = gzip.compress(text, compresslevel=9, mtime=0)
    else:
        raise RecordingError(f"a recording's name ends in .jsonl.xz or .jsonl.gz, got {path.name}")
    try:
        write_whole(path, data)
    except OSError as error:
        raise RecordingError(f"cannot write the recording {path}: {error}; name another file") from None
    return path


def load_recording(path: Path) -> Recording:
    """Read a recording, checking sizes and every field.

    Raises:
        RecordingError: the file cannot be read, is too large, is damaged, or is no recording of this format.
    """
    try:
        return _parse(_lines(path))
    except OSError as error:
        raise RecordingError(f"cannot read the recording {path}: {error}") from None
    except (ValueError, TypeError, KeyError, EOFError, lzma.LZMAError, zlib.error, MoetuneError) as error:
        raise RecordingError(
            f"{path} is no usable recording: {error}; record it again with `sweep --record`"
        ) from error


def shipped_recording(shape: MoEShape) -> Path | None:
    """Return the shipped recording of ``shape``, or None; by the file's name, as for tables."""
    found = SHIPPED_DIRECTORY / f"{shape.key}.jsonl.xz"
    return found if found.is_file() else None


def shipped_shapes() -> list[str]:
    """Return the keys of the shapes that have a shipped recording."""
    return sorted(path.name.removesuffix(".jsonl.xz") for path in SHIPPED_DIRECTORY.glob("*.jsonl.xz"))


def replay_commands() -> tuple[str, ...]:
    """Return a ready command for each shipped recording: what a machine without a GPU can sweep."""
    named = [layer_options(key) for key in shipped_shapes()]
    return tuple(f"moetune sweep {options}".rstrip() for options in named if options is not None)


def _header(recording: Recording) -> dict[str, Any]:
    return {
        "moetune_recording": FORMAT_VERSION,
        "provenance": recording.provenance.to_json(),
        "ceilings": dict(recording.ceilings),
        "bounds": {str(tokens): round(bound_us, 4) for tokens, bound_us in sorted(recording.bounds.items())},
        "measured_at": recording.measured_at,
        "command": recording.command,
        "trials": len(recording.trials),
    }


def _parse(lines: Iterator[bytes]) -> Recording:
    header = load(next(lines, b""))
    if not isinstance(header, dict) or "moetune_recording" not in header:
        raise ValueError("its first line is no recording header")
    fields = cast("dict[str, Any]", header)
    if fields["moetune_recording"] != FORMAT_VERSION:
        raise ValueError(f"format {fields['moetune_recording']!r}, this moetune reads {FORMAT_VERSION}")
    trials: list[Trial] = []
    for number, line in enumerate(lines, start=2):
        if len(trials) >= MAX_TRIALS:
            raise ValueError(f"more than {MAX_TRIALS} trials")
        try:
            trials.append(trial_from_json(load(line)))
        except (ValueError, TypeError, MoetuneError) as error:
            raise ValueError(f"line {number}: {error}") from error
    if len(trials) != fields["trials"]:
        raise ValueError(f"the header says {fields['trials']!r} trials, the file has {len(trials)}")
    return Recording(
        provenance=Provenance.from_json(fields["provenance"]),
        ceilings={name: _positive(fields["ceilings"][name], name) for name in ("bytes_per_s", "flops")},
        bounds={_token_count(tokens): _positive(bound, "a bound") for tokens, bound in dict(fields["bounds"]).items()},
        measured_at=str(fields["measured_at"])[:MAX_TEXT],
        command=str(fields["command"])[:MAX_TEXT],
        trials=tuple(trials),
    )


def _positive(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def _token_count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 6 or not 0 < int(text) <= MAX_TOKENS:
        raise ValueError(f"a bound's token count must be a whole number from 1 to {MAX_TOKENS}, got {text[:20]!r}")
    return int(text)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the file's lines, never holding more than one chunk and one line of the text."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
    rest = b""
    for chunk in _chunks(path.read_bytes(), _decoder(path)):
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES or any(len(line) > MAX_LINE_BYTES for line in whole):
            raise ValueError(f"a line is longer than {MAX_LINE_BYTES} bytes")
        yield from whole
    if rest:
        raise ValueError("its last line is cut off")


def _decoder(path: Path) -> _Decoder:
    if path.suffix == ".gz":
        return cast("_Decoder", zlib.decompressobj(wbits=31))
    return lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=DECODER_MEMORY_BYTES)


def _chunks(data: bytes, decoder: _Decoder) -> Iterator[bytes]:
    total = 0
    while not decoder.eof:
        chunk = decoder.decompress(data, CHUNK_BYTES)
        # zlib hands back what it did not consume; lzma keeps it inside.
        data = cast("bytes", getattr(decoder, "unconsumed_tail", b""))
        if not chunk and not data and not decoder.eof:
            raise ValueError("the file is cut off")
        total += len(chunk)
        if total > MAX_TEXT_BYTES:
            raise ValueError(f"more than {MAX_TEXT_BYTES} bytes of text")
        yield chunk
