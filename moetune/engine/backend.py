"""What a sweep asks of the machine: implemented live (cuda), by recorded trials (replay) and by the compiler alone."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from moetune.outcome import Compiled, Failed, Figure, Measured, Outcome
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

Kernel = tuple[Role, MoEKernelConfig]
WAIT_S = 0.5  # for the next compiled kernel, before a waiting caller looks at its clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the device reached in this run: bytes per second (read + written) and dense FLOP/s of the format."""

    bytes_per_s: float
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFigures:
    """Figures of a whole layer, as tables carry them."""

    flops_per_byte: Figure
    bandwidth_gbps: Figure
    issue_efficiency: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryTerms:
    """Which kernels that enter a race get samples after their first launch, and how many.

    Args:
        slow_ratio: times the fastest first launch so far; one that took longer gets none.
        samples: of a kernel whose first launch took less than ``long_us``.
        long_samples: of any other.
        long_us: microseconds.
        best_us: the fastest first launch so far.
    """

    slow_ratio: float
    samples: int
    long_samples: int
    long_us: float
    best_us: float = inf

    def after(self, first_us: float) -> EntryTerms:
        """Return the terms for whoever comes next."""
        return replace(self, best_us=first_us) if first_us < self.best_us else self

    def samples_after(self, first_us: float) -> int:
        """Return how many samples follow a first launch of so many microseconds; 0 where it is hopeless."""
        if first_us > self.slow_ratio * self.best_us:
            return 0
        return self.long_samples if first_us >= self.long_us else self.samples


@dataclass(frozen=True, slots=True)
class Entered:
    """How a kernel entered a race.

    ``first_us`` is None where the first launch failed, and ``outcome`` says how; else that is how its samples ended, None
    where it got none.
    """

    first_us: float | None
    outcome: Outcome | None


class KernelByKernel(Protocol):
    """What a backend can do with several kernels, made of what it can do with one."""

    def first_launch_us(self, role: Role, config: MoEKernelConfig) -> float | Failed:
        """Time the very first launch after loading: the race's entry ticket."""
        ...

    def time_kernel(self, role: Role, config: MoEKernelConfig, samples: int) -> Outcome:
        """Time one kernel with a cold L2, ``samples`` launches after one warm-up launch."""
        ...

    def verify_kernel(self, role: Role, config: MoEKernelConfig) -> Failed | None:
        """Compare with the float32 reference; None when it matches."""
        ...

    def recheck_kernel(self, role: Role, config: MoEKernelConfig) -> Failed | None:
        """Compare again, right after ``time_kernel`` of the same kernel: what its timed launches left, then bursts."""
        ...

    def enter_kernels(self, role: Role, configs: Sequence[MoEKernelConfig], terms: EntryTerms) -> Generator[Entered]:
        """Let kernels into a race one after the other."""
        for config in configs:
            first_us = self.first_launch_us(role, config)
            if isinstance(first_us, Failed):
                yield Entered(None, first_us)
                continue
            samples = terms.samples_after(first_us)
            terms = terms.after(first_us)
            yield Entered(first_us, self.time_kernel(role, config, samples) if samples else None)

    def verify_kernels(self, role: Role, configs: Sequence[MoEKernelConfig]) -> Generator[Failed | None]:
        """Compare each with the float32 reference."""
        for config in configs:
            yield self.verify_kernel(role, config)

    def time_kernels(self, role: Role, configs: Sequence[MoEKernelConfig], samples: int) -> Generator[Outcome]:
        """Time each."""
        for config in configs:
            yield self.time_kernel(role, config, samples)

    def time_and_recheck_kernels(
        self, role: Role, configs: Sequence[MoEKernelConfig], samples: int
    ) -> Generator[Outcome]:
        """Time each, and compare it again right after."""
        for config in configs:
            outcome = self.time_kernel(role, config, samples)
            wrong = self.recheck_kernel(role, config) if isinstance(outcome, Measured) else None
            yield wrong or outcome


class Backend(Protocol):
    """The one boundary between the search and a GPU. Every failure comes back as a value; only bugs raise.

    Order of calls: ``ceilings``, then per token count ``open`` followed by any of the others. Compiling goes on beside
    all of that: what ``submit`` queued, ``ended`` gives back as it ends.
    """

    @property
    def name(self) -> str:
        """``cuda`` or ``replay``: what the table's ``backend`` field will say."""
        ...

    @property
    def device(self) -> DeviceInfo:
        """The device that answers."""
        ...

    @property
    def shape(self) -> MoEShape:
        """The layer that is tuned."""
        ...

    def ceilings(self) -> Ceilings:
        """Measure (or recall) the device's limits."""
        ...

    def recorded(self, role: Role) -> Sequence[MoEKernelConfig] | None:
        """Return the only configs that can be answered (replay), or None when any can (cuda)."""
        ...

    def recorded_plans(self, tokens: int) -> Sequence[LayerPlan]:
        """Return the plans whose layer time is recorded at ``tokens`` (replay); none where any plan can be timed."""
        ...

    def submit(self, kernels: Iterable[Kernel]) -> None:
        """Queue kernels to be compiled in parallel, in their order, and return at once."""
        ...

    def ended(self, wait_s: float = 0.0) -> Sequence[tuple[Kernel, Compiled | Failed]]:
        """Return the queued kernels that ended since the last call, in any order.

        Args:
            wait_s: how long to wait for the first one where none has ended and some are under way.
        """
        ...

    def withdraw(self) -> Sequence[Kernel]:
        """Take back the queued kernels that no compiler has begun, in their order; nothing more is heard of them."""
        ...

    def open(self, tokens: int) -> Failed | None:
        """Make inputs and the float32 reference for one token count; a failure (out of memory) skips that count."""
        ...

    def bound_us(self) -> float:
        """Return the physical bound of the open token count: the larger of bytes and FLOPs over the ceilings."""
        ...

    def enter_kernels(self, role: Role, configs: Sequence[MoEKernelConfig], terms: EntryTerms) -> Generator[Entered]:
        """Let kernels into a race one after the other: load it, time its very first launch, and a few more where it may win.

        As all that follow: yields an end for each config in their order. The next kernel may be under way when an end is
        taken; who closes the generator before the last one wants no more of them.
        """
        ...

    def verify_kernels(self, role: Role, configs: Sequence[MoEKernelConfig]) -> Generator[Failed | None]:
        """Compare each with the float32 reference on fresh inputs and NaN-poisoned outputs; None when it matches.

        The timing inputs, another seed, and once per kernel the odd routings that random rows do not pose.
        """
        ...

    def time_kernels(self, role: Role, configs: Sequence[MoEKernelConfig], samples: int) -> Generator[Outcome]:
        """Time each with a cold L2, ``samples`` launches after one warm-up launch."""
        ...

    def time_and_recheck_kernels(
        self, role: Role, configs: Sequence[MoEKernelConfig], samples: int
    ) -> Generator[Outcome]:
        """Time each, then compare what its timed launches left, and bursts of it; one that is wrong has no time."""
        ...

    def time_routing(self, block_m: int) -> Outcome:
        """Time route and permute for one ``block_m``."""
        ...

    def time_combine(self) -> Outcome:
        """Time the combine kernel."""
        ...

    def time_layers(self, plans: Sequence[LayerPlan], rounds: int) -> Sequence[Outcome]:
        """Time whole layers (logits to output) by graph replay, cold L2, interleaved: ``rounds`` samples of each.

        A live backend leaves the times of each plan in the order of the rounds (``times_us``), so that plans can be
        compared round by round, and the GPU's clocks meanwhile. A plan whose last replay left a wrong output is
        ``Failed(WRONG)``.
        """
        ...

    def time_rerouted(self, plans: Sequence[LayerPlan], rounds: int) -> Sequence[Sequence[Outcome]]:
        """Time whole layers where other numbers of experts are touched, from the fewest to the most of many draws.

        Returns:
            One sequence of outcomes per routing; none where every draw touches as many experts, or in a replay, which
            recorded one routing.
        """
        ...

    def verify_layer(self, plan: LayerPlan) -> Failed | None:
        """Compare the whole layer with the reference on fresh random inputs and odd routings."""
        ...

    def prepare_counters(self) -> None:
        """Get ready what ``counters`` will need, while trials go on; optional, and once is enough."""
        ...

    def counters(self, plans: dict[int, LayerPlan], limit_s: float = 120.0) -> dict[int, LayerFigures | Failed]:
        """Read hardware counters for the winner of each token count; Failed says why there are none.

        Args:
            plans: the winner of each token count.
            limit_s: wall seconds that this may take.
        """
        ...

    def close(self) -> None:
        """Free what the run holds."""
        ...


def compiled_now(
    backend: Backend, role: Role, configs: Iterable[MoEKernelConfig]
) -> Iterator[tuple[MoEKernelConfig, Compiled | Failed]]:
    """Compile on a backend that has nothing else queued, and yield each config as it ends."""
    waiting = dict.fromkeys((role, config) for config in configs)
    backend.submit(list(waiting))
    while waiting:
        for kernel, result in backend.ended(WAIT_S):
            if waiting.pop(kernel, kernel) is None:
                yield kernel[1], result
