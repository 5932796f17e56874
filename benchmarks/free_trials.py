"""A GPU that is not there and answers at once: every time follows from the choice alone, so that equal sweeps find the same.

Loaded by the GPU process of ``host_time.py``. It keeps to what moetune's own trials do but launch: the same questions, and
answers of the same size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

from moetune.engine.backend import Ceilings, KernelByKernel
from moetune.measure.gpu_messages import GpuSettings
from moetune.measure.stopwatch import Stopwatch, question
from moetune.outcome import (
    TIME_DIGITS,
    ClockSpan,
    Compiled,
    Failed,
    FailureKind,
    Figure,
    Measured,
    Outcome,
    Source,
    summarize,
)
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import TARGETS, DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

DEVICE = TARGETS["sm_90"]
LIMITS = Ceilings(bytes_per_s=4.2e12, flops=7.8e14)
CLOCKS = ClockSpan(sm_mhz=(1830, 1980), memory_mhz=(3201, 3201), temperature_c=(41, 48), power_w=(310.5, 640.25))
SMALL_US, LAYER_US = 3.0, 12.0  # a routing or combine kernel; what a layer takes beside its GEMMs
BEST, WORST = 1.05, 2.95  # times its bound that a kernel takes
JITTER = 0.01  # of one sample
WRONG = 61  # every so many kernels one is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSettings(GpuSettings):
    """Settings whose answers take ``answer_s`` seconds each, as a GPU's would."""

    answer_s: float = 0.0


def open_free(settings: FreeSettings) -> FreeTrials:
    """Return the trials of a layer; what a GPU process is started with."""
    return FreeTrials(settings)


class FreeTrials(KernelByKernel):
    """Trials of a layer without a launch. See :class:`moetune.measure.cuda.CudaTrials` for what each question means."""

    def __init__(self, settings: FreeSettings) -> None:
        self.device: DeviceInfo = DEVICE
        self.lost: Failed | None = None
        self.stopwatch = Stopwatch()
        self._shape, self._answer_s, self._tokens = settings.shape, settings.answer_s, 1

    def asked(self) -> float:
        """Return the seconds that all questions so far took here."""
        return self.stopwatch.total_s

    def learn(self, compiled: Mapping[tuple[Role, MoEKernelConfig], Compiled], ceilings: Ceilings | None) -> None:
        """Take over nothing: all answers follow from the question."""

    @question
    def ceilings(self) -> Ceilings:
        """Return the limits of an H200."""
        return LIMITS

    @question
    def open(self, tokens: int) -> None:
        """Choose the token count."""
        self._tokens = tokens

    @question
    def bound_us(self) -> float:
        """Return what bytes and FLOPs of the whole layer allow."""
        return _bound_us(self._shape, self._tokens)

    @question
    def first_launch_us(self, role: Role, config: MoEKernelConfig) -> float:
        """Return a time a little over the later ones."""
        self._take_time()
        return 1.1 * self._kernel_us(role, config)

    @question
    def time_kernel(self, role: Role, config: MoEKernelConfig, samples: int) -> Outcome:
        """Return the median of so many samples."""
        self._take_time()
        return _measured(_times_us(self._kernel_us(role, config), samples, config))

    @question
    def verify_kernel(self, role: Role, config: MoEKernelConfig) -> Failed | None:
        """Find some kernels wrong."""
        self._take_time()
        wrong = _luck(role, config, 0) % WRONG == 0
        return Failed(FailureKind.WRONG, "row 3, column 5 is 1, not 2 (timing inputs)") if wrong else None

    @question
    def recheck_kernel(self, role: Role, config: MoEKernelConfig) -> None:
        """Find all right."""
        del role, config
        self._take_time()

    @question
    def time_routing(self, block_m: int) -> Outcome:
        """Return the time of a small kernel."""
        return _measured(_times_us(SMALL_US, 15, block_m))

    @question
    def time_combine(self) -> Outcome:
        """Return the time of a small kernel."""
        return _measured(_times_us(SMALL_US, 15, 0))

    @question
    def time_layers(self, plans: Sequence[LayerPlan], rounds: int) -> Sequence[Outcome]:
        """Return the times of whole layers, with those of each round and the clocks."""
        self._take_time()
        return [self._layer(plan, rounds, 1.0) for plan in plans]

    @question
    def time_rerouted(self, plans: Sequence[LayerPlan], rounds: int) -> Sequence[Sequence[Outcome]]:
        """Return their times under three other routings, of a few tokens."""
        if self._tokens * self._shape.top_k >= 8 * self._shape.local_experts:
            return []
        return [[self._layer(plan, rounds, factor) for plan in plans] for factor in (0.8, 0.9, 1.1)]

    @question
    def verify_layer(self, plan: LayerPlan) -> None:
        """Find all right."""
        del plan
        self._take_time()

    def clocks(self) -> ClockSpan:
        """Return the clocks of a busy GPU."""
        return CLOCKS

    def card(self) -> None:
        """Know nothing of the card."""

    def _take_time(self) -> None:
        if self._answer_s:
            time.sleep(self._answer_s)

    def _kernel_us(self, role: Role, config: MoEKernelConfig) -> float:
        share = (2 if role is Role.GATE_UP else 1) / 3
        luck = (_luck(role, config, self._tokens // 512) % 997) / 997
        return 4.0 + share * _bound_us(self._shape, self._tokens) * (BEST + (WORST - BEST) * luck**2)

    def _layer(self, plan: LayerPlan, rounds: int, factor: float) -> Measured:
        layer_us = LAYER_US + sum(self._kernel_us(role, plan.config(role)) for role in Role)
        return _measured(_times_us(factor * layer_us, rounds, plan), with_rounds=True)


def _bound_us(shape: MoEShape, tokens: int) -> float:
    rows = tokens * shape.top_k
    flops = 6.0 * rows * shape.hidden * shape.inter
    touched_bytes = min(shape.local_experts, rows) * shape.expert_bytes
    return 1e6 * max(flops / LIMITS.flops, touched_bytes / LIMITS.bytes_per_s)


@lru_cache(maxsize=1 << 14)
def _luck(role: Role, config: MoEKernelConfig, where: int) -> int:
    return crc32(f"{role.value} {where} {config}".encode())


def _times_us(true_us: float, samples: int, choice: object) -> list[float]:
    """Return so many times around the true one, drawn by a generator that every choice starts elsewhere."""
    state = _start_of(choice)
    times: list[float] = []
    for _ in range(samples):
        state = (1664525 * state + 1013904223) % (1 << 32)
        times.append(round(true_us * (1.0 + JITTER * (state / (1 << 32) - 0.5)), TIME_DIGITS))
    return times


@lru_cache(maxsize=1 << 14)
def _start_of(choice: object) -> int:
    return crc32(str(choice).encode())


def _measured(times_us: Sequence[float], *, with_rounds: bool = False) -> Measured:
    sample = summarize(times_us)
    return Measured(
        median_us=sample.median_us,
        spread_us=sample.spread_us,
        samples=sample.count,
        flops_per_byte=Figure(61.728, Source.ANALYTICAL),
        bandwidth_gbps=Figure(2e6 / sample.median_us, Source.EVENT),
        issue_efficiency=Figure(10.0 / sample.median_us, Source.STATIC),
        times_us=tuple(times_us) if with_rounds else (),
        clocks=CLOCKS if with_rounds else None,
    )
