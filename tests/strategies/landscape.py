"""A made-up GPU over the real space: flat where memory binds, needles where compute does, and a guess that errs.

What was measured on an H200 gives its character: how many configs come within a few percent of the best, how well the
guess ranks them, which share fails, and that axes interact. The errors of the guess are tables over pairs of axes that
drift with the token count, plus luck of single configs: another family of functions than any model of a search, so that
no search meets its own assumptions.

As a script it writes a recording of all configs of a shape: ``python tests/strategies/landscape.py FILE.jsonl.xz qwen 0``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import exp, log2
from pathlib import Path
from random import Random
from zlib import crc32

from moetune.outcome import Compiled, Failed, FailureKind, Figure, Measured, Outcome, Stage, Subject, Trial
from moetune.space import sensible_block_ms
from moetune.space.enumerate import Ground, enumerate_configs
from moetune.space.load import ExpertLoad
from moetune.space.prior import Problem, predict
from moetune.store import Provenance, Recording, save_recording
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import TARGETS, DeviceInfo
from moetune_kernels.shape import MoEShape

QWEN = MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8)
MIXTRAL = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NONE = Figure.unavailable("made up")
SUBJECT = {Role.GATE_UP: Subject.GATE_UP, Role.DOWN: Subject.DOWN}
AXES = ("structure", "block_m", "block_n", "block_k", "num_warps", "prefetch_distance")
PAIR_ERROR = 0.035  # of log time, of each of the 15 pairs of axes
LUCK = 0.008  # of log time, of a single config
FAILING = 0.03  # of the configs; a rule of axes adds its own
FLOOR = 6.0  # how sharply times level off at the physical bound
MANY_ROWS = 128.0
LAUNCH_US, FLOPS_PER_US = 4.0, 6.06e6  # of one multiprocessor: the unit of the guess


@dataclass
class Landscape:
    """Times and failures of every config of one layer on one device.

    Args:
        shape: the layer.
        seed: of the errors.
        device: what the configs must be legal on.
    """

    shape: MoEShape = QWEN
    seed: int = 0
    device: DeviceInfo = field(default_factory=lambda: TARGETS["sm_90"])

    def __post_init__(self) -> None:
        self._tables: dict[tuple[object, ...], tuple[float, float]] = {}
        self._best: dict[tuple[Role, int], float] = {}

    def configs(self, role: Role, tokens: Sequence[int]) -> tuple[MoEKernelConfig, ...]:
        """Return every legal config for ``tokens`` without a register cap: what the measured shares are of."""
        ground = Ground(Problem(self.shape, self.device, role), tuple(tokens))
        return tuple(config for config in enumerate_configs(ground).configs if config.max_registers is None)

    def outcome(self, role: Role, config: MoEKernelConfig, tokens: int) -> Outcome:
        """Return how a trial without noise ends."""
        if self._fails(role, config):
            return Failed(FailureKind.LAUNCH, "made up to fail")
        time_us = self.time_us(role, config, tokens)
        return Measured(
            median_us=time_us,
            spread_us=0.007 * time_us,
            samples=25,
            flops_per_byte=NONE,
            bandwidth_gbps=NONE,
            issue_efficiency=NONE,
        )

    def time_us(self, role: Role, config: MoEKernelConfig, tokens: int) -> float:
        """Return the true time: the guess times its error, levelled off at the bound where memory binds."""
        ratio = self._raw(role, config, tokens) / self._bound(role, tokens)
        flat = min(1.0, MANY_ROWS / ExpertLoad.of(self.shape, tokens).rows) ** 0.5
        levelled = (flat + ratio**FLOOR) ** (1 / FLOOR)
        return LAUNCH_US + levelled * self._bound(role, tokens) / FLOPS_PER_US

    def best_us(self, role: Role, tokens: int) -> float:
        """Return the time of the best config that runs."""
        if (role, tokens) not in self._best:
            self._best[role, tokens] = min(
                self.time_us(role, config, tokens)
                for config in self.configs(role, (tokens,))
                if not self._fails(role, config)
            )
        return self._best[role, tokens]

    def _bound(self, role: Role, tokens: int) -> float:
        load = ExpertLoad.of(self.shape, tokens)
        problem = Problem(self.shape, self.device, role)
        elements = problem.matrices * problem.columns * problem.depth
        memory = load.touched * elements * 2 * 190.0 / self.device.sm_count
        return max(memory, 2.0 * load.touched * load.rows * elements / self.device.sm_count) * 1.1

    def _raw(self, role: Role, config: MoEKernelConfig, tokens: int) -> float:
        late = (log2(tokens) - 7.0) / 7.0
        error = 0.0
        for names in combinations(AXES, 2):
            steady, drifting = self._table(role, names, tuple(getattr(config, name) for name in names))
            error += PAIR_ERROR * (steady + drifting * late) / 1.4
        luck = crc32(f"{self.seed} {role.value} {tokens // 48} {config}".encode()) / 2**31 - 1.0
        return predict(config, Problem(self.shape, self.device, role), tokens) * exp(error + LUCK * luck)

    def _table(self, *key: object) -> tuple[float, float]:
        if key not in self._tables:
            random = Random(f"{self.seed} {key}")
            self._tables[key] = random.gauss(0, 1), random.gauss(0, 1)
        return self._tables[key]

    def _fails(self, role: Role, config: MoEKernelConfig) -> bool:
        by_rule = config.num_warps == 2 and config.block_k == 256 and config.block_n >= 128
        return by_rule or crc32(f"fail {self.seed} {role.value} {config}".encode()) < FAILING * 2**32


def trials(landscape: Landscape, tokens: Sequence[int]) -> Iterator[Trial]:
    """Yield the trial of every config whose height makes sense at a token count."""
    compiled = Compiled(registers=128, spills=0, smem_bytes=4096, block_size=128)
    for role in Role:
        configs = landscape.configs(role, tokens)
        for count in tokens:
            sensible = sensible_block_ms(landscape.shape, count)
            for config in configs:
                if config.block_m in sensible:
                    outcome = landscape.outcome(role, config, count)
                    yield Trial(
                        subject=SUBJECT[role],
                        tokens=count,
                        choice=config,
                        stage=Stage.SCREEN,
                        outcome=outcome,
                        compiled=compiled,
                        verified=isinstance(outcome, Measured),
                    )


def recording(landscape: Landscape, tokens: Sequence[int] = LADDER) -> Recording:
    """Return the exhaustive recording of the landscape."""
    return Recording(
        provenance=Provenance(
            backend="cuda",
            shape=landscape.shape,
            device=landscape.device,
            kernels_sha256="0" * 64,
            triton="made up",
            torch="made up",
            driver="made up",
        ),
        ceilings={"bytes_per_s": 4.2e12, "flops": 7.8e14},
        bounds=dict.fromkeys(tokens, 1.0),
        measured_at="2026-12-01T00:00:00+00:00",
        command="a made-up landscape: nothing was measured",
        trials=tuple(trials(landscape, tokens)),
    )


if __name__ == "__main__":
    target, name, number = sys.argv[1:4]
    made = Landscape({"qwen": QWEN, "mixtral": MIXTRAL}[name], int(number))
    print(save_recording(recording(made), Path(target)))
