"""One kernel's launch choice, and the one place that says why a choice cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from moetune_kernels.errors import UnsupportedConfigError, shown
from moetune_kernels.shape import ACTIVATION_BYTES, MoEShape

if TYPE_CHECKING:
    from moetune_kernels.device import DeviceInfo


class Role(Enum):
    """Which of the layer's two grouped GEMMs a config launches."""

    __hash__ = object.__hash__  # members are singletons, and Enum hashes their names in Python

    GATE_UP = "gate_up"
    DOWN = "down"


class Structure(Enum):
    """How a kernel is built; each is its own kernel file."""

    __hash__ = object.__hash__  # as of Role

    GATHER = "gather"  # weights and rows by pointer
    TMA = "tma"  # persistent; weights by descriptor, gate-up rows by pointer, down rows by descriptor
    TMA_PERMUTE = "tma_permute"  # gate-up only: rows are first copied into expert order, then all by descriptor


BLOCK_SIZES = (16, 32, 64, 128, 256)
WARP_COUNTS = (1, 2, 4, 8, 16)
MAX_PREFETCH = 8
MAX_GROUP_M = 64
MAX_ACCUMULATORS = 128  # 32-bit accumulator registers per thread; 256 spilled 391 times on sm_90 (128x256, 4 warps)
MAXNREG_MARGIN = 26  # ptxas refuses a register cap under accumulators + 26 (seen in 7 of 120 configs on sm_90)
MAX_DESCRIPTOR_ROW = (1 << 31) - 1  # coordinates of a TMA load are signed 32-bit integers
BARRIER_BYTES = 1024  # what the barriers of a TMA pipeline, or of tcgen05, may add to the tiles


# The values that each field may have, in the order of the checks.
_ALLOWED: tuple[tuple[str, tuple[int, ...] | range], ...] = (
    ("block_m", BLOCK_SIZES),
    ("block_n", BLOCK_SIZES),
    ("block_k", BLOCK_SIZES),
    ("num_warps", WARP_COUNTS),
    ("warp_size", (32, 64)),
    ("prefetch_distance", range(1, MAX_PREFETCH + 1)),
    ("group_m", range(1, MAX_GROUP_M + 1)),
    ("split_k", range(1, 17)),
    ("max_registers", range(24, 256)),
    ("smem_size", range(1, (1 << 20) + 1)),
)
_OPTIONAL = ("max_registers", "smem_size")


class _Hashed:
    """The place of a hash that is made once: a search looks a config up in dicts hundreds of times. Never pickled."""

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEKernelConfig(_Hashed):
    """How one grouped GEMM is launched. Frozen and born valid.

    Args:
        structure: which kernel file.
        block_m: rows (slots of one expert) per tile.
        block_n: output columns per tile; in gate-up, columns of h (a tile of gate and one of up, both this wide).
        block_k: depth of one step along the inner dimension.
        num_warps: warps that the program asks for.
        prefetch_distance: pipeline stages, Triton's ``num_stages``.
        max_registers: register cap per thread (``maxnreg``); None leaves it to the compiler.
        smem_size: ceiling in bytes on the shared memory of a block; None means the device's own limit.
        group_m: row tiles that share one pass over the columns, for L2 reuse.
        split_k: how many programs share one tile's inner dimension.
        warp_size: threads of a warp (32; 64 on AMD CDNA).

    Raises:
        UnsupportedConfigError: a field is outside its range.
    """

    structure: Structure
    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    prefetch_distance: int = 3
    max_registers: int | None = None
    smem_size: int | None = None
    group_m: int = 1
    split_k: int = 1
    warp_size: int = 32

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED:
            value = getattr(self, name)
            if type(value) is not int or value not in allowed:
                if value is None and name in _OPTIONAL:
                    continue
                raise UnsupportedConfigError(f"{name} must be {_described(allowed)}, got {shown(value)}")
        if not isinstance(self.structure, Structure):  # pyright: ignore[reportUnnecessaryIsInstance] - born valid
            raise UnsupportedConfigError(f"structure must be a Structure, got {shown(self.structure)}")

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            found = hash(
                (
                    self.structure,
                    self.block_m,
                    self.block_n,
                    self.block_k,
                    self.num_warps,
                    self.prefetch_distance,
                    self.max_registers,
                    self.smem_size,
                    self.group_m,
                    self.split_k,
                    self.warp_size,
                )
            )
            object.__setattr__(self, "_hash", found)
            return found

    @property
    def block_size(self) -> int:
        """Threads that the compiled kernel launches per block."""
        return self.num_warps * self.warp_size

    def launch_kwargs(self) -> dict[str, Any]:
        """Return the keywords that Triton's launch takes."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.prefetch_distance}
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return options

    def smem_estimate(self, sm: int, shape: MoEShape, role: Role) -> int:
        """Return the bytes of shared memory that the pipelined tiles need on compute capability ``sm``.

        Asynchronous tensor instructions (wgmma: sm_90, 64 rows or more, 4 warps or more) read every stage from shared
        memory; mma.sync tiles hold one stage less, because the last is already in registers. Afterwards the output
        tile is rearranged for the store in the same bytes. Checked against the compiler in
        ``tests/offline/test_smem_rule.py``.
        """
        tiles = 2 if role is Role.GATE_UP else 1
        row_bytes = self.block_m * ACTIVATION_BYTES + tiles * self.block_n * shape.format.bytes_per_weight
        per_stage = int(row_bytes * self.block_k)
        by_descriptor = self.structure is not Structure.GATHER
        asynchronous = sm >= 90 and sm != 120 and self.block_m >= 64 and self.num_warps >= 4
        stages = self.prefetch_distance if asynchronous else max(self.prefetch_distance - 1, 1)
        barriers = BARRIER_BYTES if by_descriptor or (asynchronous and 100 <= sm < 120) else 0
        return max(stages * per_stage + barriers, self.block_m * self.block_n * ACTIVATION_BYTES)

    def why_not(self, device: DeviceInfo, shape: MoEShape, role: Role) -> str | None:
        """Say why this config cannot run ``role`` of ``shape`` on ``device``, or None when it can."""
        for rule in (_why_not_format, _why_not_structure, _why_not_descriptor, _why_not_registers, _why_not_smem):
            reason = rule(self, device, shape, role)
            if reason is not None:
                return reason
        return None

    def why_not_cap(self, cap: int | None, role: Role) -> str | None:
        """Say why this tile cannot run under a register cap in place of its own; no other rule asks for caps."""
        accumulators = self.accumulators(role)
        if cap is not None and cap < accumulators + MAXNREG_MARGIN:
            return f"max_registers={cap} is under {accumulators} accumulators + {MAXNREG_MARGIN}"
        return None

    def accumulators(self, role: Role) -> int:
        """Return the accumulator registers of one thread."""
        tiles = 2 if role is Role.GATE_UP else 1
        return tiles * self.block_m * self.block_n // self.block_size

    def with_smem(self, smem_bytes: int) -> MoEKernelConfig:
        """Return the config with its ceiling lowered to what the compiler reported."""
        return replace(self, smem_size=smem_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, with the properties ``block_size`` for readers."""
        value: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return value | {"structure": self.structure.value, "block_size": self.block_size}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MoEKernelConfig:
        """Parse what :meth:`to_json` wrote; raises UnsupportedConfigError naming the field that is wrong."""
        if not isinstance(value, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - a file may hold anything
            raise UnsupportedConfigError(f"a kernel config must be an object, got {type(value).__name__}")
        known = {field.name for field in fields(cls)} | {"block_size"}
        unknown = sorted(set(value) - known, key=str)
        missing = [name for name in ("structure", "block_m", "block_n", "block_k") if name not in value]
        if unknown or missing:
            raise UnsupportedConfigError(f"a kernel config has unknown fields {unknown} and lacks {missing}")
        parsed = {name: item for name, item in value.items() if name != "block_size"}
        try:
            parsed["structure"] = Structure(value["structure"])
        except ValueError:
            names = ", ".join(member.value for member in Structure)
            raise UnsupportedConfigError(f"structure must be one of {names}, got {shown(value['structure'])}") from None
        config = cls(**parsed)
        if "block_size" in value and value["block_size"] != config.block_size:
            raise UnsupportedConfigError(
                f"block_size must be num_warps x warp_size = {config.block_size}, got {shown(value['block_size'])}"
            )
        return config


def _described(allowed: tuple[int, ...] | range) -> str:
    if isinstance(allowed, range):
        return f"a whole number from {allowed.start} to {allowed.stop - 1}"
    return f"one of {', '.join(map(str, allowed))}"


def _why_not_format(config: MoEKernelConfig, device: DeviceInfo, shape: MoEShape, role: Role) -> str | None:
    del config, role
    if not shape.format.is_dense16:
        return f"the kernels run bf16 and fp16 weights so far, not {shape.format.value}"
    if not device.is_amd and device.sm < 80:
        return f"needs compute capability 8.0 or newer, {device.name} has {device.sm / 10:.1f}"
    return None


def _why_not_structure(config: MoEKernelConfig, device: DeviceInfo, shape: MoEShape, role: Role) -> str | None:
    del shape
    name = config.structure.value
    if config.split_k != 1:
        return f"structure {name} has no split-K, got split_k={config.split_k}"
    if config.warp_size != device.warp_size:
        return f"warp_size is {config.warp_size}, the device's warps have {device.warp_size} threads"
    if config.structure is Structure.GATHER:
        return None
    if device.is_amd or device.sm < 90:
        return f"structure {name} needs compute capability 9.0 or newer"
    if config.structure is Structure.TMA_PERMUTE and role is Role.DOWN:
        return "structure tma_permute is for gate-up; the rows of down are in expert order already, use tma"
    return None


def _why_not_descriptor(config: MoEKernelConfig, device: DeviceInfo, shape: MoEShape, role: Role) -> str | None:
    del device
    if config.structure is Structure.GATHER:
        return None
    name = config.structure.value
    inner = shape.hidden if role is Role.GATE_UP else shape.inter
    rows = shape.local_experts * (2 * shape.inter if role is Role.GATE_UP else shape.hidden)
    if rows > MAX_DESCRIPTOR_ROW:
        return f"structure {name} counts weight rows in 32 bits, the experts have {rows:,} rows together; use gather"
    if inner * 2 % 16:
        return f"structure {name} needs row strides that are a multiple of 16 bytes, got {inner * 2}"
    if inner % config.block_k:
        return f"structure {name} takes no K tail: {inner} is not a multiple of block_k={config.block_k}"
    return None


def _why_not_registers(config: MoEKernelConfig, device: DeviceInfo, shape: MoEShape, role: Role) -> str | None:
    del device, shape
    accumulators = config.accumulators(role)
    if accumulators > MAX_ACCUMULATORS:
        return f"needs {accumulators} accumulator registers per thread, at most {MAX_ACCUMULATORS} do not spill"
    return config.why_not_cap(config.max_registers, role)


def _why_not_smem(config: MoEKernelConfig, device: DeviceInfo, shape: MoEShape, role: Role) -> str | None:
    limit = device.smem_limit if config.smem_size is None else min(config.smem_size, device.smem_limit)
    needed = config.smem_estimate(device.sm, shape, role)
    if config.smem_size is not None and needed <= device.smem_limit:
        return None  # a ceiling from a table is what the compiler reported, which the estimate may overshoot
    if needed > limit:
        return f"needs {needed:,} B of shared memory, the limit is {limit:,} B"
    return None
