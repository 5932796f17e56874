"""From a model's name, its config file or bare sizes to the shape that one rank tunes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moetune.errors import UsageError
from moetune.models.catalogue import Model, find_model, models_of
from moetune.models.config_json import LIMITS, read_config
from moetune_kernels.shape import MoEShape, WeightFormat

DEFAULT_SIZES = {"hidden": 4096, "inter": 14336, "experts": 64, "top_k": 2}
MAX_RANKS = 1024
_KEY = re.compile(r"e(?P<experts>\d+)_h(?P<hidden>\d+)_i(?P<inter>\d+)_k(?P<top_k>\d+)_(?P<format>[a-z0-9]+)")


@dataclass(frozen=True, slots=True)
class ShapeRequest:
    """What the user said about the layer; None where nothing was said. Sizes are the model's, before tp and ep."""

    model: str | None = None
    config: Path | None = None
    hidden: int | None = None
    inter: int | None = None
    experts: int | None = None
    top_k: int | None = None
    tp: int = 1
    ep: int = 1
    format: WeightFormat | None = None


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The shape of one rank, the model's name (None for bare sizes), and what should be said about the choice."""

    shape: MoEShape
    name: str | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """What the catalogue or a config file knows, before flags."""

    name: str | None
    sizes: dict[str, int]
    format: WeightFormat | None
    gating: str
    problems: dict[str, str]
    notes: tuple[str, ...]


def resolve_shape(request: ShapeRequest) -> ResolvedModel:
    """Return the shape to tune: flags override the model or config, then tp divides the width and ep the experts.

    Raises:
        UsageError: unknown model, unreadable config, sizes out of range or not divisible, a format that cannot run.

    >>> resolve_shape(ShapeRequest(model="mixtral-8x7b", tp=2)).shape.key
    'e8_h4096_i7168_k2_bf16'
    """
    origin = _origin(request)
    sizes, notes = _with_flags(request, origin)
    weight_format = _format(request, origin)
    local_experts, ep_notes = _split_experts(sizes["experts"], request.ep)
    shape = MoEShape(
        hidden=sizes["hidden"],
        inter=_split_width(sizes["inter"], request.tp),
        local_experts=local_experts,
        top_k=sizes["top_k"],
        format=weight_format,
        experts=sizes["experts"],
        gating=origin.gating,
    )
    name = origin.name if all(origin.sizes.get(size) == sizes[size] for size in sizes) else None
    return ResolvedModel(shape, name, origin.notes + _router_notes(origin) + notes + ep_notes)


def layer_options(key: str) -> str | None:
    """Return the options that name the layer with this shape key, a model where one has it; None where none can.

    The default layer needs no options.

    >>> layer_options("e128_h2048_i768_k8_bf16"), layer_options("e8_h512_i256_k2_fp16")
    ('--model qwen3-30b-a3b', '--hidden 512 --inter 256 --experts 8 --top-k 2 --format fp16')
    """
    if key == resolve_shape(ShapeRequest()).shape.key:
        return ""
    for model in models_of(key):
        return f"--model {model.name}" + ("" if model.format is WeightFormat.BF16 else " --format bf16")
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    sizes = " ".join(f"--{name.replace('_', '-')} {found[name]}" for name in DEFAULT_SIZES)
    return sizes + ("" if found["format"] == WeightFormat.BF16.value else f" --format {found['format']}")


def _origin(request: ShapeRequest) -> _Origin:
    if request.model is not None and request.config is not None:
        raise UsageError("--model and --config both name a model; give one of them")
    if request.model is not None:
        return _from_catalogue(find_model(request.model))
    if request.config is not None:
        return _from_config(request.config)
    return _Origin(
        name=None, sizes=dict(DEFAULT_SIZES), format=WeightFormat.BF16, gating="softmax", problems={}, notes=()
    )


def _from_catalogue(model: Model) -> _Origin:
    sizes = {"hidden": model.hidden, "inter": model.inter, "experts": model.experts, "top_k": model.top_k}
    notes = () if model.differs is None else (f"{model.name}: {model.differs}",)
    return _Origin(name=model.name, sizes=sizes, format=model.format, gating=model.gating, problems={}, notes=notes)


def _from_config(path: Path) -> _Origin:
    reading = read_config(path)
    return _Origin(
        name=reading.name,
        sizes=dict(reading.sizes),
        format=reading.format,
        gating=reading.gating,
        problems=dict(reading.problems),
        notes=reading.notes,
    )


def _with_flags(request: ShapeRequest, origin: _Origin) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the four sizes with flags applied, and a note for every value that a flag replaced."""
    sizes: dict[str, int] = {}
    notes: list[str] = []
    for size, limit in LIMITS.items():
        flag = "--" + size.replace("_", "-")
        given = getattr(request, size)
        if given is not None and not 1 <= given <= limit:
            raise UsageError(f"{flag} must be a whole number from 1 to {limit}, got {given}")
        known = origin.sizes.get(size)
        if given is not None:
            sizes[size] = given
            if known not in (given, None) and origin.name is not None:
                notes.append(f"{flag} {given} replaces the {known} of {origin.name}")
        elif known is not None and size not in origin.problems:
            sizes[size] = known
        else:
            raise UsageError(f"{request.config}: {origin.problems[size]}")
    if "activation" in origin.problems:
        raise UsageError(f"{request.config}: {origin.problems['activation']}")
    if sizes["top_k"] > sizes["experts"]:
        raise UsageError(
            f"--top-k {sizes['top_k']} is more than the {sizes['experts']} experts; give at most that many"
        )
    return sizes, tuple(notes)


def _router_notes(origin: _Origin) -> tuple[str, ...]:
    if origin.gating == "softmax":
        return ()
    return (f"{origin.name} scores its router with {origin.gating}; the router timed here is a softmax top-k",)


def _format(request: ShapeRequest, origin: _Origin) -> WeightFormat:
    """Return the weight format: the flag's, else the checkpoint's, and only one that the kernels run."""
    chosen = request.format or origin.format
    if chosen is None:
        raise UsageError(f"{request.config}: {origin.problems['format']}")
    if chosen.is_dense16:
        return chosen
    who = f"--format {chosen.value}" if request.format else f"{origin.name} stores its experts as {chosen.value}, which"
    runnable = " or ".join(f"--format {one.value}" for one in WeightFormat if one.is_dense16)
    raise UsageError(f"{who} is not supported by the kernels so far; {runnable} tunes the same sizes in 16 bits")


def _split_width(inter: int, tp: int) -> int:
    """Return I per rank.

    Raises:
        UsageError: tp does not divide the width; the sentence names the sizes that do.
    """
    if not 1 <= tp <= MAX_RANKS:
        raise UsageError(f"--tp must be a whole number from 1 to {MAX_RANKS}, got {tp}")
    if inter % tp:
        works = ", ".join(str(n) for n in range(1, 65) if inter % n == 0)
        raise UsageError(f"--tp {tp} does not divide the intermediate size {inter}; sizes that do: {works}")
    return inter // tp


def _split_experts(experts: int, ep: int) -> tuple[int, tuple[str, ...]]:
    """Return rank 0's experts, the larger share where they do not divide, with a note that says so."""
    if not 1 <= ep <= MAX_RANKS:
        raise UsageError(f"--ep must be a whole number from 1 to {MAX_RANKS}, got {ep}")
    if ep > experts:
        raise UsageError(f"--ep {ep} is more than the {experts} experts; give at most --ep {experts}")
    share, left = divmod(experts, ep)
    if not left:
        return share, ()
    note = f"{experts} experts over {ep} ranks: {left} hold {share + 1}, {ep - left} hold {share}; tuned for rank 0, the larger"
    return share + 1, (note,)
