"""A sweep's searches against recorded times: what a strategy would have found, and what it would have cost.

Only the searches are rehearsed, role by role and count by count in a sweep's order and with a sweep's quotas: no layer
is composed. A recorded median is the truth; what the search sees of it is noisy as a few samples are. The seconds are
the cost model's, not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from random import Random

from moetune.engine.bench import EVERY_COUNT, SUBJECT_OF
from moetune.engine.costs import FLUSH_S, KERNEL_S, LOAD_S, ROUND_S, TRIAL_S
from moetune.engine.memory import Memory
from moetune.engine.race import BATCH, pattern_of
from moetune.engine.schedule import MOST_KERNELS, POLISH_SHARE, carried_over, order, quotas
from moetune.outcome import Measured, Outcome, Stage, Trial
from moetune.space import Space, sensible_block_ms
from moetune.space.load import ExpertLoad
from moetune.space.prior import Problem
from moetune.space.select import Selector, select
from moetune.strategies.base import Strategy, StrategyFactory, Terrain
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.shape import MoEShape

FEW_SAMPLES_NOISE = 0.007  # relative, of the median of three samples (H200: 0.5 to 1%)
FINAL_NOISE, FINAL_SAMPLES = 0.002, 25
FINALISTS, FINAL_RATIO = 8, 1.06  # timed again at the end, as a race's last heat does
ROLE_OF = {subject: role for role, subject in SUBJECT_OF.items()}

Answers = Mapping[tuple[Role, int], Mapping[MoEKernelConfig, Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Every recorded trial of both GEMMs.

    Args:
        shape: the layer.
        device: what was recorded.
        answers: how each config ended, per role and token count; heights that make no sense there are left out.
    """

    shape: MoEShape
    device: DeviceInfo
    answers: Answers

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token counts at which both GEMMs have a config that ran."""
        counts = {tokens for _, tokens in self.answers}
        return tuple(sorted(tokens for tokens in counts if all(self.best_us(role, tokens) < 1e30 for role in Role)))

    def best_us(self, role: Role, tokens: int) -> float:
        """Return the time of the best recorded config."""
        ended = self.answers.get((role, tokens), {}).values()
        return min((outcome.median_us for outcome in ended if isinstance(outcome, Measured)), default=float("inf"))

    def configs(self, role: Role) -> tuple[MoEKernelConfig, ...]:
        """Return every recorded config of ``role``, in the order of the recording."""
        found = (config for (known, _), answers in self.answers.items() if known is role for config in answers)
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Found:
    """What one race found: its pick's true time over the best recorded one, less 1; and trials of those recorded."""

    role: Role
    tokens: int
    regret: float
    trials: int
    recorded: int


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One sweep's searches with one seed: what each race found, distinct kernels compiled, simulated seconds."""

    races: tuple[Found, ...]
    kernels: int
    seconds: float


@dataclass
class _Stage:
    """The sweep that is played: what is compiled and loaded, and the seconds so far."""

    truth: Truth
    memory: Memory
    random: Random
    compiled: dict[Role, dict[MoEKernelConfig, None]]
    seconds: float = 0.0
    loaded: set[tuple[Role, MoEKernelConfig]] = field(default_factory=set[tuple[Role, MoEKernelConfig]])

    def compile(self, role: Role, configs: Sequence[MoEKernelConfig]) -> None:
        fresh = [config for config in configs if config not in self.compiled[role]]
        self.compiled[role].update(dict.fromkeys(fresh))
        self.seconds += max(ROUND_S, KERNEL_S * len(fresh)) if fresh else 0.0

    def time(self, role: Role, tokens: int, config: MoEKernelConfig, samples: int, noise: float) -> Outcome:
        outcome = self.truth.answers[role, tokens][config]
        self.seconds += TRIAL_S + (0.0 if (role, config) in self.loaded else LOAD_S)
        self.loaded.add((role, config))
        if isinstance(outcome, Measured):
            self.seconds += (samples + 1) * (1e-6 * outcome.median_us + FLUSH_S)
            outcome = _noisy(outcome, exp(self.random.gauss(0.0, noise)))
        self.memory.log.record(role, tokens, config, outcome)
        return outcome


def rehearse(
    truth: Truth,
    strategy: StrategyFactory,
    seed: int,
    tokens: Sequence[int],
    guesses: dict[tuple[Role, int, MoEKernelConfig], float] | None = None,
) -> Rehearsal:
    """Play the searches of a sweep of ``tokens``.

    Args:
        truth: what is recorded.
        strategy: the search.
        seed: of the strategy and of the noise.
        tokens: recorded token counts.
        guesses: the prior's guesses, to be shared by several rehearsals of one truth.
    """
    spaces = {role: _space(truth, role, tokens) for role in Role}
    memory = Memory(guesses={} if guesses is None else guesses)
    noise = Random(seed)  # noqa: S311  # noise, not secrets
    stage = _Stage(truth, memory, noise, {role: {} for role in Role})
    for role in Role:
        stage.compile(role, spaces[role].configs)
    rows = {count: ExpertLoad.of(truth.shape, count).rows for count in tokens}
    quota = quotas(rows, int(POLISH_SHARE * MOST_KERNELS) // len(Role))
    races: list[Found] = []
    for count in order(tokens):
        for role in Role:
            spent = len(stage.compiled[role]) - len(spaces[role].configs)
            here = carried_over(quota, count, spent)
            terrain = stage.memory.terrain(spaces[role], stage.compiled[role], count, here)
            strategy_here = strategy(_answered(terrain, truth.answers[role, count]), seed)
            races.append(_race(stage, role, count, strategy_here))
    return Rehearsal(tuple(races), sum(map(len, stage.compiled.values())), stage.seconds)


def _space(truth: Truth, role: Role, tokens: Sequence[int]) -> Space:
    """Return the recorded space with a first round chosen as a sweep chooses it."""
    recorded = truth.configs(role)
    first_round = int((1.0 - POLISH_SHARE) * MOST_KERNELS) // len(Role)
    known = set(recorded)
    problem = Problem(truth.shape, truth.device, role)
    first = select(recorded, Selector(problem, tokens, known.__contains__), first_round)
    reserve = tuple(config for config in recorded if config not in set(first))
    return Space(truth.shape, truth.device, role, tuple(tokens), first, len(recorded), reserve=reserve)


def _answered(terrain: Terrain, answers: Mapping[MoEKernelConfig, Outcome]) -> Terrain:
    """Return the part of a terrain that is recorded at its token count."""

    def neighbours(config: MoEKernelConfig) -> list[MoEKernelConfig]:
        return [other for other in terrain.neighbours(config) if other in answers]

    return replace(
        terrain,
        compiled=tuple(config for config in terrain.compiled if config in answers),
        reserve=tuple(config for config in terrain.reserve if config in answers),
        neighbours=neighbours,
    )


def _race(stage: _Stage, role: Role, tokens: int, strategy: Strategy) -> Found:
    samples = pattern_of(stage.truth.best_us(role, tokens)).entry_samples
    times: dict[MoEKernelConfig, float] = {}
    trials = 0
    while asked := strategy.ask(BATCH):
        stage.compile(role, asked)
        for config in asked:
            outcome = stage.time(role, tokens, config, samples, FEW_SAMPLES_NOISE)
            strategy.tell(config, outcome)
            trials += 1
            if isinstance(outcome, Measured):
                times[config] = outcome.median_us
    recorded = len(stage.truth.answers[role, tokens])
    return Found(role, tokens, _regret(stage, role, tokens, times), trials, recorded)


def _regret(stage: _Stage, role: Role, tokens: int, times: Mapping[MoEKernelConfig, float]) -> float:
    """Time the best again, as a race's last heat does, and return how far the pick is from the best recorded."""
    ranked = sorted(times, key=lambda config: times[config])
    finalists = [config for config in ranked[:FINALISTS] if times[config] <= FINAL_RATIO * times[ranked[0]]]
    final: dict[MoEKernelConfig, float] = {}
    for config in finalists:
        outcome = stage.time(role, tokens, config, FINAL_SAMPLES, FINAL_NOISE)
        if isinstance(outcome, Measured):
            final[config] = outcome.median_us
    if not final:
        return float("inf")
    pick = stage.truth.answers[role, tokens][min(final, key=lambda config: final[config])]
    assert isinstance(pick, Measured)
    return pick.median_us / stage.truth.best_us(role, tokens) - 1.0


def truth_of(shape: MoEShape, device: DeviceInfo, trials: Iterable[Trial]) -> Truth:
    """Return what recorded trials say: the last screening of each config at each count where its height makes sense.

    A config that failed at compile is answered with that failure at every count.
    """
    answers: dict[tuple[Role, int], dict[MoEKernelConfig, Outcome]] = {}
    everywhere: dict[Role, dict[MoEKernelConfig, Outcome]] = {role: {} for role in Role}
    for trial in trials:
        role, config = ROLE_OF.get(trial.subject), trial.choice
        if role is None or trial.stage is not Stage.SCREEN or not isinstance(config, MoEKernelConfig):
            continue
        if trial.tokens == EVERY_COUNT:
            everywhere[role][config] = trial.outcome
        elif config.block_m in sensible_block_ms(shape, trial.tokens):
            answers.setdefault((role, trial.tokens), {})[config] = trial.outcome
    for (role, tokens), known in answers.items():
        sensible = sensible_block_ms(shape, tokens)
        known.update({config: end for config, end in everywhere[role].items() if config.block_m in sensible})
    return Truth(shape=shape, device=device, answers=answers)


def _noisy(outcome: Measured, factor: float) -> Measured:
    return replace(outcome, median_us=factor * outcome.median_us)
