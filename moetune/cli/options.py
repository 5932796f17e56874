"""Options that more than one command takes, each written once, and the parsing of their values."""

from __future__ import annotations

import math
import os
import shlex
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.output import out
from moetune.errors import UsageError
from moetune.models.resolve import ResolvedModel, ShapeRequest, resolve_shape
from moetune_kernels.device import TARGETS, DeviceInfo
from moetune_kernels.shape import MAX_TOKENS, WeightFormat

SWEEP_TOKENS = "1,2,4,8,16,24,32,48,64,96,128,256,512,1024,2048,4096,8192,16384"
PROFILE_TOKENS = "1,64,4096"
MOST_NOISE_PERCENT = 20.0  # two plans that far apart are equal to nobody
MAX_NAME_BYTES = 255  # of one part of a path, on every usual file system

_LAYER = "Which layer"
_WHERE = "On which device"
MAX_DEVICE = 1023
ALL_DEVICES = "all"
_MEASURED = "What is measured"


def given_path(text: str | Path) -> Path:
    """Return the path that was typed; an empty one is a variable that was never set, not the current folder.

    Raises:
        typer.BadParameter: it is empty.
    """
    if text == "":
        raise typer.BadParameter("the path is empty; give a name")
    # No shell expands the value of an environment variable. A default, which is a path already, comes here too.
    return Path(os.path.expanduser(text)) if str(text).startswith("~/") else Path(text)  # noqa: PTH111 - never raises


LOCAL_OPTIONS = ("--out", "--store", "--record")


def command_line(leave_out: tuple[str, ...] = ()) -> str:
    """Return the command that is running, to be run again; bytes that are no text are written out.

    Args:
        leave_out: options that go with their values: a table that others load has no use for its maker's paths.
    """
    kept: list[str] = []
    arguments = iter(sys.argv[1:])
    for argument in arguments:
        if argument in leave_out:
            next(arguments, None)
        elif not argument.startswith(tuple(f"{name}=" for name in leave_out)):
            kept.append(argument)
    return os.fsencode(shlex.join(["moetune", *kept])).decode("utf-8", "backslashreplace")


ModelOpt = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A model of the catalogue, e.g. qwen3-30b-a3b.", rich_help_panel=_LAYER),
]
ConfigOpt = Annotated[
    Path | None,
    typer.Option(metavar="FILE", parser=given_path, help="A Hugging Face config.json.", rich_help_panel=_LAYER),
]
HiddenOpt = Annotated[
    int | None, typer.Option(metavar="H", help="Hidden size (4096 unless a model says).", rich_help_panel=_LAYER)
]
InterOpt = Annotated[
    int | None,
    typer.Option(
        metavar="I", help="Width of one expert, before --tp (14336 unless a model says).", rich_help_panel=_LAYER
    ),
]
ExpertsOpt = Annotated[
    int | None, typer.Option(metavar="E", help="Experts, before --ep (64 unless a model says).", rich_help_panel=_LAYER)
]
TopKOpt = Annotated[
    int | None, typer.Option(metavar="K", help="Experts per token (2 unless a model says).", rich_help_panel=_LAYER)
]
TpOpt = Annotated[int, typer.Option(metavar="N", help="Ranks that share each expert's width.", rich_help_panel=_LAYER)]
EpOpt = Annotated[int, typer.Option(metavar="N", help="Ranks that share the experts.", rich_help_panel=_LAYER)]
FormatOpt = Annotated[
    WeightFormat | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="Weight format: bf16 or fp16 so far (the checkpoint's unless given).",
        rich_help_panel=_LAYER,
    ),
]
DeviceOpt = Annotated[
    int,
    typer.Option(
        metavar="INDEX",
        min=0,
        max=MAX_DEVICE,
        help="CUDA device, counted within CUDA_VISIBLE_DEVICES.",
        rich_help_panel=_WHERE,
    ),
]
DevicesOpt = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="LIST",
        help="CUDA device, several with commas between, or all idle ones of one model.",
        rich_help_panel=_WHERE,
    ),
]
RoutingOpt = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="How tokens choose experts while timed: uniform, zipf[:1.1], hot[:0.5], or a trace, FILE.npz.",
        show_default=False,
        rich_help_panel=_MEASURED,
    ),
]
TargetOpt = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help=f"Work for a device that is not here: {', '.join(TARGETS)}.", rich_help_panel=_WHERE
    ),
]


def resolve(request: ShapeRequest) -> ResolvedModel:
    """Return the layer that the options name, and say on stderr what was chosen on the way."""
    layer = resolve_shape(request)
    for note in layer.notes:
        out.note(note)
    return layer


def parse_tokens(text: str) -> tuple[int, ...]:
    """Return the token counts of a comma list, sorted, without duplicates.

    Raises:
        UsageError: no number, a number out of range, or no count at all.

    >>> parse_tokens("64, 1,64")
    (1, 64)
    """
    counts: set[int] = set()
    for part in text.split(","):
        word = part.strip()
        # isascii: int() also reads other scripts' digits, and underscores, which nobody means here
        if not (word.isascii() and word.removeprefix("-").isdigit()) or len(word) > 12:
            raise UsageError(f"--tokens takes whole numbers with commas between, e.g. 1,64,4096; got {word[:40]!r}")
        if not 1 <= int(word) <= MAX_TOKENS:
            raise UsageError(f"--tokens must be from 1 to {MAX_TOKENS}, got {word}")
        counts.add(int(word))
    return tuple(sorted(counts))


def parse_budget(seconds: float | None) -> float | None:
    """Return the budget in seconds.

    Raises:
        UsageError: not a positive, finite number.
    """
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"--budget must be a positive number of seconds, got {seconds}")
    return seconds


def parse_noise(percent: float) -> float:
    """Return the noise as a share of a time.

    Raises:
        UsageError: not from 0 to 20 percent.

    >>> parse_noise(0.5)
    0.005
    """
    if not 0 <= percent <= MOST_NOISE_PERCENT:  # also refuses NaN
        raise UsageError(f"--noise must be from 0 to {MOST_NOISE_PERCENT:g} percent, got {percent:g}")
    return percent / 100


def parse_devices(text: str) -> tuple[int, tuple[int, ...] | None]:
    """Return the first CUDA device and those beside it, None for every idle one of the same model.

    Raises:
        UsageError: no list of device numbers.

    >>> parse_devices("1"), parse_devices("0,2,3"), parse_devices("all")
    ((1, ()), (0, (2, 3)), (0, None))
    """
    if text.strip() == ALL_DEVICES:
        return 0, None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) <= 4 and int(word) <= MAX_DEVICE for word in words):
        raise UsageError(
            f"--device takes a number from 0 to {MAX_DEVICE}, several with commas between, or {ALL_DEVICES}, "
            f"got {text[:40]!r}; see `moetune sweep --help`"
        )
    first, *beside = dict.fromkeys(map(int, words))
    return first, tuple(beside)


def parse_target(name: str | None) -> DeviceInfo | None:
    """Return the device to work for without owning it.

    Raises:
        UsageError: no such target.
    """
    if name is None:
        return None
    return _lookup(TARGETS, name, "--target")


def _lookup(known: Mapping[str, DeviceInfo], name: str, flag: str) -> DeviceInfo:
    if name not in known:
        raise UsageError(f"{flag} must be one of {', '.join(known)}, got {name[:40]!r}")
    return known[name]


def output_dir(path: Path | None, flag: str = "--out") -> Path | None:
    """Return ``path`` once it is clear that files can be written there: before the work, not after it.

    Raises:
        UsageError: it is a file, or its nearest existing parent cannot be written to.
    """
    if path is None:
        return None
    parents = path.absolute().parents
    try:
        nearest = next((one for one in (path, *parents) if os.path.lexists(one)), Path("/"))
        leads_to_a_folder = stat.S_ISDIR(nearest.stat().st_mode)
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be used ({error.strerror}); give another folder") from None
    if not leads_to_a_folder:
        raise UsageError(f"{flag} {path}: {nearest} is a file; give a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"{flag} {path}: no permission to write to {nearest}; give another folder")
    if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in path.parts):
        raise UsageError(f"{flag} {str(path)[:40]}… has a name of over {MAX_NAME_BYTES} bytes; give a shorter one")
    return path


def output_file(path: Path | None, flag: str) -> Path | None:
    """Return ``path`` once it is clear that a file can be written there.

    Raises:
        UsageError: it is a folder, or its folder cannot be written to.
    """
    if path is None:
        return None
    output_dir(path.absolute().parent, flag)
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return path
    except OSError as error:
        raise UsageError(f"{flag} {str(path)[:80]} cannot be used ({error.strerror}); give another file") from None
    if is_folder:
        raise UsageError(f"{flag} {path} is a folder; give a file")
    return path


def named_paths(paths: Sequence[Path], kinds: str) -> Sequence[Path]:
    """Return ``paths`` once it is clear that each of them is there; ``kinds`` says what they should be.

    Raises:
        UsageError: one is not there, or cannot be looked at.
    """
    for path in paths:
        try:
            path.stat()
        except FileNotFoundError:
            raise UsageError(f"{path} does not exist; give {kinds}") from None
        except OSError as error:
            raise UsageError(f"{str(path)[:80]} cannot be read ({error.strerror}); give {kinds}") from None
    return paths
