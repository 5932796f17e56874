"""What the steps of a sweep cost in seconds: first by figures of an H200, then corrected by what this sweep saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moetune.engine.backend import Ceilings
from moetune.engine.budget import CountCost
from moetune.engine.compose import FINALISTS
from moetune.engine.finals import FIRST_ROUNDS, LAST_PLANS, REROUTED_ROUNDS
from moetune.engine.ladder import ROUNDS as PROBE_ROUNDS
from moetune.engine.last_heat import FEWEST_ROUNDS, LAST_SECONDS
from moetune.engine.race import SAFE_ENTRANTS, Pattern, pattern_of
from moetune_kernels.config import Role
from moetune_kernels.shape import MoEShape

# Read off the time stamps of two stored sweeps of an H200 (16 cores).
FLUSH_S = 0.1e-3  # before every sample
TRIAL_S = 0.5e-3  # Python, launches and the store, per trial
LOAD_S = 0.015  # the first launch of a kernel in this process (3 to 25 ms)
REFERENCE_FLOPS, REFERENCE_BYTES_PER_S = 2e13, 8e11  # float32, expert by expert
OPENING_S = 0.1  # beside the reference
SMALL_KERNELS_S, SMALL_KERNEL_ROWS = 1.0, 64  # routing kernels of their own at each small count, up to so many slots
LAST_ROUNDS = 40  # of the last heat, were all its plans timed equally often: 16 of five plans, then more of fewer
CAPTURE_S = 5e-3  # one layer's graph
GATE_UP_SHARE = 0.66  # of a layer's time
BEST_RATIO, ENTRANT_RATIO = 1.3, 1.9  # over the bound: a finisher's time, and any entrant's
KERNEL_S = 0.1  # of a compile pool of 15 processes
COUNTERS_S, COUNTERS_ENTRY_S, COUNTERS_BYTE_S = 9.0, 0.1, 1.1e-9  # ncu starts, and makes the weights again
# What follows is estimated, not read off: comparing one output with its reference takes one wait; odd problems are posed
# once to each kernel that is verified, a quarter of which are new at a token count; a second seed is compared at up to
# so many slots; a burst of launches, three of them compared, follows the last heat of kernels up to a millisecond.
CHECK_S, CHECK_ELEMENT_S = 5e-4, 6e-11
ODD_S, NEW_SHARE, OTHER_SEED_SLOTS = 2.5e-3, 0.25, 1024
BURST_S, BURST_CHECKS, BURST_LAUNCH_S = 2e-3, 3, 1e-3
LAYER_CHECK_S, LAYER_RUNS = 2e-3, 2
# What was seen counts against so many seconds of what was foreseen, and the correction stays within these.
TRUST_S, LOWEST, HIGHEST = 10.0, 0.4, 3.0

REROUTED = 5  # other routings of a few tokens
REROUTED_ROWS = 5  # rows per expert below which draws of the router commonly leave experts untouched


@dataclass(frozen=True, slots=True)
class Entrants:
    """Kernels that one role's race would time: all of them, and those not loaded yet."""

    count: int
    unloaded: int


@dataclass
class Costs:
    """The cost model of one sweep.

    Args:
        shape: the layer.
        ceilings: what the device reaches.
    """

    shape: MoEShape
    ceilings: Ceilings
    _foreseen_s: float = field(default=TRUST_S)
    _seen_s: float = field(default=TRUST_S)

    def of_count(self, tokens: int, entrants: Mapping[Role, Entrants]) -> CountCost:
        """Return what ``tokens`` tokens are expected to cost."""
        layer_s, reference_s = BEST_RATIO * self._bound_s(tokens), self._reference_s(tokens)
        races = {role: self._race_s(role, tokens, entrants[role]) for role in Role}
        small_s = SMALL_KERNELS_S if tokens * self.shape.top_k <= SMALL_KERNEL_ROWS else 0.05
        rerouted_s = (
            _rerouted_s(layer_s) if tokens * self.shape.top_k < REROUTED_ROWS * self.shape.local_experts else 0.0
        )
        cost = CountCost(
            opening_s=OPENING_S + reference_s,
            gate_up_s=races[Role.GATE_UP],
            down_s=races[Role.DOWN],
            ending_s=sum(self._ending_s(role, tokens) for role in Role),
            down_ending_s=self._ending_s(Role.DOWN, tokens),
            finals_s=small_s
            + reference_s
            + _finals_s(layer_s, FINALISTS + 3, LAST_PLANS + 1, LAST_ROUNDS)
            + rerouted_s,
            least_s=reference_s + _finals_s(layer_s, 3, 3, FEWEST_ROUNDS) + rerouted_s,
        )
        return cost.times(self._correction)

    def probe_s(self, tokens: int, plans: int) -> float:
        """Return what timing so many plans between two entries is expected to take."""
        layer_s = BEST_RATIO * self._bound_s(tokens)
        return self._correction * (OPENING_S + self._reference_s(tokens) + plans * _plan_s(layer_s, PROBE_ROUNDS))

    def counters_s(self, entries: int) -> float:
        """Return what hardware counters of ``entries`` winners are expected to take."""
        weights = self.shape.local_experts * self.shape.expert_bytes
        return COUNTERS_S + COUNTERS_ENTRY_S * entries + COUNTERS_BYTE_S * weights

    def learn(self, foreseen_s: float, seen_s: float) -> None:
        """Take in what the count that just ended was expected to take, and what it took."""
        self._foreseen_s += foreseen_s / self._correction
        self._seen_s += seen_s

    @property
    def _correction(self) -> float:
        return min(max(self._seen_s / self._foreseen_s, LOWEST), HIGHEST)

    def _bound_s(self, tokens: int) -> float:
        rows = self._rows(tokens)
        return max(
            self._flops(tokens) / self.ceilings.flops,
            min(float(self.shape.local_experts), rows) * self.shape.expert_bytes / self.ceilings.bytes_per_s,
        )

    def _rows(self, tokens: int) -> float:
        return tokens * self.shape.top_k * self.shape.local_experts / (self.shape.experts or self.shape.local_experts)

    def _flops(self, tokens: int) -> float:
        return 6.0 * self._rows(tokens) * self.shape.hidden * self.shape.inter

    def _reference_s(self, tokens: int) -> float:
        touched = min(float(self.shape.local_experts), self._rows(tokens))
        read_s = touched * self.shape.expert_bytes / REFERENCE_BYTES_PER_S
        return self._flops(tokens) / REFERENCE_FLOPS + read_s

    def _kernel_s(self, role: Role, tokens: int) -> float:
        share = GATE_UP_SHARE if role is Role.GATE_UP else 1.0 - GATE_UP_SHARE
        return share * self._bound_s(tokens)

    def _pattern(self, role: Role, tokens: int) -> Pattern:
        return pattern_of(1e6 * BEST_RATIO * self._kernel_s(role, tokens))

    def _entry_s(self, role: Role, tokens: int, count: int) -> float:
        samples = self._pattern(role, tokens).entry_samples
        return count * (TRIAL_S + _samples_s(ENTRANT_RATIO * self._kernel_s(role, tokens), samples + 1))

    def _race_s(self, role: Role, tokens: int, entrants: Entrants) -> float:
        heats = self._pattern(role, tokens).heats
        finishers = [min(entrants.count, 2 * heat.per_block_m) for heat in heats]  # one or two block_m are usual
        heats_s = sum(self._heat_s(role, tokens, heat.samples, n) for heat, n in zip(heats, finishers, strict=True))
        checks_s = finishers[0] * self._verify_s(role, tokens) + finishers[1] * self._recheck_s(role, tokens)
        return self._entry_s(role, tokens, entrants.count) + LOAD_S * entrants.unloaded + checks_s + heats_s

    def _ending_s(self, role: Role, tokens: int) -> float:
        heats = self._pattern(role, tokens).heats
        heats_s = sum(self._heat_s(role, tokens, heat.samples, SAFE_ENTRANTS) for heat in heats)
        checks_s = SAFE_ENTRANTS * (self._verify_s(role, tokens) + self._recheck_s(role, tokens))
        return self._entry_s(role, tokens, SAFE_ENTRANTS) + checks_s + heats_s

    def _heat_s(self, role: Role, tokens: int, samples: int, count: int) -> float:
        return count * (TRIAL_S + _samples_s(BEST_RATIO * self._kernel_s(role, tokens), samples))

    def _verify_s(self, role: Role, tokens: int) -> float:
        share = 2 / 3 if role is Role.GATE_UP else 1 / 3  # of the weights, all of which one odd problem reads
        weights_s = share * self.shape.local_experts * self.shape.expert_bytes / self.ceilings.bytes_per_s
        seeds = 2 if tokens * self.shape.top_k <= OTHER_SEED_SLOTS else 1
        return seeds * self._check_s(role, tokens) + NEW_SHARE * (ODD_S + weights_s)

    def _recheck_s(self, role: Role, tokens: int) -> float:
        has_burst = BEST_RATIO * self._kernel_s(role, tokens) <= BURST_LAUNCH_S
        burst_s = BURST_S + BURST_CHECKS * self._check_s(role, tokens) if has_burst else 0.0
        return self._check_s(role, tokens) + burst_s

    def _check_s(self, role: Role, tokens: int) -> float:
        columns = self.shape.inter if role is Role.GATE_UP else self.shape.hidden
        return CHECK_S + CHECK_ELEMENT_S * self._rows(tokens) * columns


def _samples_s(kernel_s: float, samples: int) -> float:
    """Return the time of a warm-up launch and of ``samples`` cold ones."""
    return (samples + 1) * kernel_s + samples * FLUSH_S


def _finals_s(layer_s: float, plans: int, last_plans: int, rounds: int) -> float:
    first_s = plans * _plan_s(layer_s)
    round_s = last_plans * (layer_s + FLUSH_S)
    last_s = last_plans * (CAPTURE_S + 2 * layer_s) + max(min(rounds * round_s, LAST_SECONDS), FEWEST_ROUNDS * round_s)
    return first_s + last_s + last_plans * (LAYER_CHECK_S + LAYER_RUNS * layer_s)


def _rerouted_s(layer_s: float) -> float:
    """Return the time of the winner beside the default under other routings."""
    return REROUTED * 2 * (CAPTURE_S + 2 * layer_s + REROUTED_ROUNDS * (layer_s + FLUSH_S))


def _plan_s(layer_s: float, rounds: int = FIRST_ROUNDS) -> float:
    """Return the time of one plan in the first heat, or in so many rounds."""
    return CAPTURE_S + 2 * layer_s + rounds * (layer_s + FLUSH_S)
