"""What a user allows to win: ceilings, structures and a space file. Every limit removes on its own; together they intersect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from moetune.outcome import Compiled, Failed, FailureKind, Trial
from moetune.space.axes import Axes
from moetune.space.occupancy import FEWEST_REGISTERS, MOST_REGISTERS
from moetune_kernels.config import BARRIER_BYTES, MAXNREG_MARGIN, MoEKernelConfig, Role, Structure
from moetune_kernels.device import DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

NO_CEILING = 1 << 20  # bytes: above every device's shared memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What a space file allows one GEMM: every combination of its axes, and every config that it lists.

    Args:
        axes: None where the file lists configs alone.
        listed: the configs, each with its ceiling in bytes; their own ``smem_size`` is None.
    """

    axes: Axes | None = None
    listed: Mapping[MoEKernelConfig, int] = field(default_factory=dict[MoEKernelConfig, int])

    def holds(self, config: MoEKernelConfig) -> bool:
        """Whether the launch choice is inside."""
        return self.ceiling(config) is not None

    def ceiling(self, config: MoEKernelConfig) -> int | None:
        """Return the most bytes of shared memory that the config may take, None where it is not inside at all."""
        ceiling = self.listed.get(without_ceiling(config))
        if self.axes is not None and self.axes.holds(config):
            ceiling = max(ceiling or 0, self.axes.smem_size or NO_CEILING)
        return ceiling


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceFile:
    """A checked space file: its name, for sentences, and what it allows each GEMM; a GEMM that is missing is free."""

    name: str
    allowed: Mapping[Role, Allowed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may win. The default plan is timed beside it all the same, as the baseline.

    Args:
        max_smem: most bytes of shared memory per block, as the compiler reports them.
        max_registers: most registers per thread, as the compiler reports them.
        structures: the only structures; empty for all.
        file: the only configs.
    """

    max_smem: int | None = None
    max_registers: int | None = None
    structures: tuple[Structure, ...] = ()
    file: SpaceFile | None = None

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return bool(self.structures) or any(
            limit is not None for limit in (self.max_smem, self.max_registers, self.file)
        )

    @property
    def text(self) -> str:
        """The limits as they are typed."""
        return " ".join(word for word in (self._structures, self._smem, self._registers, self._file) if word)

    def allowed(self, role: Role) -> Allowed | None:
        """Return what the space file allows a GEMM, None where it says nothing of it."""
        return None if self.file is None else self.file.allowed.get(role)

    def why_not(self, config: MoEKernelConfig, role: Role) -> str | None:
        """Say which limit removes a launch choice, or None; one spelling per limit, so that they can be counted."""
        if self.structures and config.structure not in self.structures:
            return f"outside {self._structures}"
        allowed = self.allowed(role)
        if allowed is not None and not allowed.holds(config):
            return f"outside {self._file}"
        if self.max_registers is not None and (config.max_registers or 0) > self.max_registers:
            return f"over {self._registers}"
        return None

    def why_never(self, config: MoEKernelConfig, role: Role, shape: MoEShape, device: DeviceInfo) -> str | None:
        """Say which limit the compiled kernel cannot keep to, or None; the compiler decides what is near a limit.

        The estimate of shared memory lies above the compiler's figure, by barriers where it is close.
        """
        if not self._has_ceiling(config, role):
            return None
        least = config.smem_estimate(device.sm, shape, role) - BARRIER_BYTES
        over = self._over_smem(config, role, least)
        if over is not None or self.max_registers is None:
            return over
        least_registers = _accumulators(config, role) + MAXNREG_MARGIN
        return f"over {self._registers}" if least_registers > self.max_registers else None

    def share_taken(self, config: MoEKernelConfig, role: Role, shape: MoEShape, device: DeviceInfo) -> float:
        """Return which share of a ceiling the compiled kernel may take, of the one it takes most of: an order, no bound.

        Registers are taken for the accumulators and for a step's operands, 32 bits each.
        """
        shares = [0.0]
        if self.max_registers is not None:
            operands = (config.block_m + config.block_n) * config.block_k // (2 * config.block_size)
            shares.append((_accumulators(config, role) + MAXNREG_MARGIN + operands) / self.max_registers)
        allowed = self.allowed(role)
        in_file = None if allowed is None else allowed.ceiling(config)
        ceilings = [ceiling for ceiling in (self.max_smem, in_file) if ceiling is not None]
        if ceilings:
            shares.append(config.smem_estimate(device.sm, shape, role) / max(min(ceilings), 1))
        return max(shares)

    def why_not_compiled(self, config: MoEKernelConfig, role: Role, compiled: Compiled | None) -> str | None:
        """Say which limit removes a kernel once the compiler has reported it, or None.

        A kernel without a report is outside where a ceiling is set: nothing shows that it keeps to it.
        """
        if not self.any:
            return None
        outside = self.why_not(config, role)
        if outside is not None:
            return outside
        if compiled is None:
            return "never compiled, so nothing shows what it takes" if self._has_ceiling(config, role) else None
        if self.max_registers is not None and compiled.registers > self.max_registers:
            return f"over {self._registers}"
        return self._over_smem(config, role, compiled.smem_bytes)

    def reuses(self, trial: Trial) -> bool:
        """Whether what an earlier sweep, which may have had other limits, found out of a choice still holds.

        A kernel that is inside runs as it did then. One that was refused as slow was slow beside kernels that may be
        outside now, so it gets its first launch again.
        """
        if not self.any or not isinstance(trial.choice, MoEKernelConfig):
            return True
        outcome = trial.outcome
        if isinstance(outcome, Failed) and outcome.kind is FailureKind.SLOW:
            return False
        role = Role(trial.subject.value)
        if trial.compiled is None and isinstance(outcome, Failed):  # what the compiler refused has no report
            return self.why_not(trial.choice, role) is None
        return self.why_not_compiled(trial.choice, role, trial.compiled) is None

    def keep(self, plan: LayerPlan, reports: Reports | None = None) -> bool:
        """Whether a table's plan keeps the limits for certain.

        Args:
            plan: its ``smem_size`` are what the compiler reported, if anything.
            reports: what the compiler reported of other trials' kernels, by role and launch choice.
        """
        known = reports or {}
        configs = {role: plan.config(role) for role in Role}
        reported = {role: known.get((role, without_ceiling(one))) or _at_most(one) for role, one in configs.items()}
        return not self.any or all(self.why_not_compiled(configs[role], role, reported[role]) is None for role in Role)

    def _over_smem(self, config: MoEKernelConfig, role: Role, smem_bytes: int) -> str | None:
        if self.max_smem is not None and smem_bytes > self.max_smem:
            return f"over {self._smem}"
        allowed = self.allowed(role)
        if allowed is not None and smem_bytes > (allowed.ceiling(config) or 0):
            return f"over the smem_size of {self._file}"
        return None

    def _has_ceiling(self, config: MoEKernelConfig, role: Role) -> bool:
        allowed = self.allowed(role)
        in_file = allowed is not None and (allowed.ceiling(config) or 0) < NO_CEILING
        return self.max_smem is not None or self.max_registers is not None or in_file

    @property
    def _structures(self) -> str:
        return f"--structures {','.join(one.value for one in self.structures)}" if self.structures else ""

    @property
    def _smem(self) -> str:
        return "" if self.max_smem is None else f"--max-smem {self.max_smem}"

    @property
    def _registers(self) -> str:
        return "" if self.max_registers is None else f"--max-registers {self.max_registers}"

    @property
    def _file(self) -> str:
        return "" if self.file is None else f"--space {self.file.name}"


Reports = Mapping[tuple[Role, MoEKernelConfig], Compiled]
FREE = Limits()
REGISTER_LIMITS = (FEWEST_REGISTERS, MOST_REGISTERS)
SMEM_LIMITS = (1, NO_CEILING)


def reports_of(trials: Iterable[Trial]) -> Reports:
    """Return what the compiler reported of the kernels that were tried."""
    return {
        (Role(trial.subject.value), without_ceiling(trial.choice)): trial.compiled
        for trial in trials
        if trial.compiled is not None and isinstance(trial.choice, MoEKernelConfig)
    }


def _at_most(config: MoEKernelConfig) -> Compiled:
    """Return the most that a table's config may take: its cap, and its ceiling, which is what the compiler reported."""
    return Compiled(
        registers=MOST_REGISTERS if config.max_registers is None else config.max_registers,
        spills=0,
        smem_bytes=NO_CEILING if config.smem_size is None else config.smem_size,
        block_size=config.block_size,
    )


def _accumulators(config: MoEKernelConfig, role: Role) -> int:
    """Return the registers of a thread that hold sums; gate-up has two tiles of them."""
    return (2 if role is Role.GATE_UP else 1) * config.block_m * config.block_n // config.block_size


def without_ceiling(config: MoEKernelConfig) -> MoEKernelConfig:
    """Return the launch choice alone: a ceiling changes nothing of what is compiled."""
    return config if config.smem_size is None else replace(config, smem_size=None)
