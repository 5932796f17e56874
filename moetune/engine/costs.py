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

# Read off the time stamps of one sweep of qwen3-30b-a3b (128 experts of 2048x768, 18 token counts, nothing compiled or
# stored before) on an H200 with 16 cores, 2026-12-01: 31.6 s, 1,673 trials. What they say of each constant stands beside it.
FLUSH_S = 0.09e-3  # a sample: 22 more of them, of kernels of 12 to 1,400 us, took so much more than their launches
TRIAL_S = 0.8e-3  # of a trial: 0.2 ms on the GPU's side, 0.35 of a question and its answer, 0.2 of store and search
LOAD_S = 2e-3  # the first launch of a kernel in a GPU process: 114 of them, less a launch of a loaded one (0.4 ms)
FIRST_OF_KIND_S = 0.87  # of a GEMM's structure: four of 118 first launches took 1.7, 0.7, 0.6 and 1.3 s; there are five
REFERENCE_FLOPS, REFERENCE_BYTES_PER_S = 3e13, 1.5e11  # float32: 42 ms at 16,384 tokens; 8 ms where 1.2 GB are touched
OPENING_S = 0.03  # beside the reference: 8 ms of rows and routings, 12 ms of a table's write, clocks, plans
SEARCH_S = 0.02  # of a race's search: 0.57 s in 36 races
SMALL_KERNELS_S = 0.01  # routing at one to three block_m, and combine: 4 to 10 ms
LAST_ROUNDS = 80  # of the last heat: 120 at nine counts, 64 at three, 32 or 16 at six; all five plans took part in them
CAPTURE_S = 1e-3  # one layer's graph: the first heat of 8 to 10 plans less its rounds
GATE_UP_SHARE = 0.66  # of a layer's time: 0.64 (8 tokens) to 0.65 (64)
BEST_RATIO, ENTRANT_RATIO = 1.3, 1.9  # over the bound: 1.05 (64 tokens) to 1.9 (1 token) for the best; any entrant's
KERNEL_S = 0.08  # of a compile pool of 15 processes: 100 in the 8 s after their imports, 25 in the next 1.4 s
# ncu loads while the last counts are tuned; what is left was 5.7 s. Its shares for an entry and for making a byte of the
# weights again are those of two older sweeps, of 2.8 and 22.5 GB.
COUNTERS_S, COUNTERS_ENTRY_S, COUNTERS_BYTE_S = 2.7, 0.1, 1.1e-9
# Comparing an output with its reference: 0.6 ms and so much per element (16,384 tokens: 1.6 and 3.6 ms), on two seeds up
# to so many slots. Odd problems took 4.3 ms more, once per kernel: that was every third that was verified.
CHECK_S, CHECK_ELEMENT_S = 6e-4, 1.1e-11
ODD_S, NEW_SHARE, OTHER_SEED_SLOTS = 4.3e-3, 0.35, 1024
# A burst of launches after the last heat, for kernels up to a millisecond: 2.1 ms of 12 us, 3.5 of 180 us, 13 of 730 us.
BURST_S, BURST_LAUNCHES, BURST_LAUNCH_S = 1.3e-3, 9, 1e-3
LAYER_CHECK_S, LAYER_RUNS = 2e-3, 2  # 2 ms at 1 token, 3.4 at 64, 6.4 at 16,384, besides one reference of another seed
# What was seen counts against so many seconds of what was foreseen (eight of these counts), and the correction stays
# within these.
TRUST_S, LOWEST, HIGHEST = 4.0, 0.4, 3.0

REROUTED = 5  # other routings of a few tokens
REROUTED_ROWS = 5  # rows per expert below which draws of the router commonly leave experts untouched


@dataclass(frozen=True, slots=True)
class Entrants:
    """Kernels that one role's race would time: all of them, those not loaded yet, and their structures that are new here."""

    count: int
    unloaded: int
    new_kinds: int = 0


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
        rerouted_s = (
            _rerouted_s(layer_s) if tokens * self.shape.top_k < REROUTED_ROWS * self.shape.local_experts else 0.0
        )
        ending_s = sum(self._ending_s(role, tokens) for role in Role)
        short_s = reference_s + rerouted_s + SMALL_KERNELS_S + _finals_s(layer_s, FINALISTS + 3, 3, FEWEST_ROUNDS)
        cost = CountCost(
            opening_s=OPENING_S + reference_s,
            gate_up_s=races[Role.GATE_UP],
            down_s=races[Role.DOWN],
            ending_s=ending_s,
            down_ending_s=self._ending_s(Role.DOWN, tokens),
            finals_s=SMALL_KERNELS_S
            + reference_s
            + _finals_s(layer_s, FINALISTS + 3, LAST_PLANS + 1, LAST_ROUNDS)
            + rerouted_s,
            least_s=reference_s + _finals_s(layer_s, 3, 3, FEWEST_ROUNDS) + rerouted_s,
            shortest_s=ending_s + short_s,
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
        loads_s = LOAD_S * entrants.unloaded + FIRST_OF_KIND_S * entrants.new_kinds
        return SEARCH_S + self._entry_s(role, tokens, entrants.count) + loads_s + checks_s + heats_s

    def _ending_s(self, role: Role, tokens: int) -> float:
        heats = self._pattern(role, tokens).heats
        heats_s = sum(self._heat_s(role, tokens, heat.samples, SAFE_ENTRANTS) for heat in heats)
        checks_s = SAFE_ENTRANTS * (self._verify_s(role, tokens) + self._recheck_s(role, tokens))
        return SEARCH_S + self._entry_s(role, tokens, SAFE_ENTRANTS) + checks_s + heats_s

    def _heat_s(self, role: Role, tokens: int, samples: int, count: int) -> float:
        return count * (TRIAL_S + _samples_s(BEST_RATIO * self._kernel_s(role, tokens), samples))

    def _verify_s(self, role: Role, tokens: int) -> float:
        share = 2 / 3 if role is Role.GATE_UP else 1 / 3  # of the weights, all of which one odd problem reads
        weights_s = share * self.shape.local_experts * self.shape.expert_bytes / self.ceilings.bytes_per_s
        seeds = 2 if tokens * self.shape.top_k <= OTHER_SEED_SLOTS else 1
        return seeds * self._check_s(role, tokens) + NEW_SHARE * (ODD_S + weights_s)

    def _recheck_s(self, role: Role, tokens: int) -> float:
        kernel_s = BEST_RATIO * self._kernel_s(role, tokens)
        burst_s = BURST_S + BURST_LAUNCHES * kernel_s if kernel_s <= BURST_LAUNCH_S else 0.0
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
    last_s = max(min(rounds * round_s, LAST_SECONDS), FEWEST_ROUNDS * round_s)
    return first_s + last_s + last_plans * (LAYER_CHECK_S + LAYER_RUNS * layer_s)


def _rerouted_s(layer_s: float) -> float:
    """Return the time of the winner beside the default under other routings."""
    return REROUTED * 2 * (CAPTURE_S + 2 * layer_s + REROUTED_ROUNDS * (layer_s + FLUSH_S))


def _plan_s(layer_s: float, rounds: int = FIRST_ROUNDS) -> float:
    """Return the time of one plan in the first heat, or in so many rounds."""
    return CAPTURE_S + 2 * layer_s + rounds * (layer_s + FLUSH_S)
