"""A sweep's searches against recorded times: what a strategy would have found, and what it would have cost.

Only the searches are rehearsed, role by role and count by count in a sweep's order and with a sweep's quotas, its
survey before its races: no layer is composed. A recorded median is the truth; what the search sees of it is noisy as a
few samples are. The seconds are the cost model's, not measured: of compiling (beside the measuring, so the longer of
the two counts) and of measuring.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf
from random import Random

from moetune.engine.bench import ROLE_OF
from moetune.engine.costs import FLUSH_S, KERNEL_S, LOAD_S, TRIAL_S
from moetune.engine.entrance import BATCH
from moetune.engine.memory import Memory
from moetune.engine.pace import FEWEST_TRIALS
from moetune.engine.race import pattern_of
from moetune.engine.schedule import MOST_KERNELS, POLISH_SHARE, Quota, carried_over, order, quotas
from moetune.outcome import EVERY_COUNT, Measured, Outcome, Stage, Trial
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
    compile_s: float = 0.0
    loaded: set[tuple[Role, MoEKernelConfig]] = field(default_factory=set[tuple[Role, MoEKernelConfig]])

    def compile(self, role: Role, configs: Sequence[MoEKernelConfig]) -> None:
        fresh = [config for config in configs if config not in self.compiled[role]]
        self.compiled[role].update(dict.fromkeys(fresh))
        self.compile_s += KERNEL_S * len(fresh)

    def screen(self, role: Role, tokens: int, config: MoEKernelConfig) -> Outcome:
        """Time a config as the entry of a race does."""
        samples = pattern_of(self.truth.best_us(role, tokens)).entry_samples
        return self.time(role, tokens, config, samples, FEW_SAMPLES_NOISE)

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
    late: dict[tuple[Role, int], list[MoEKernelConfig]] = {}
    for count in [count for count in order(tokens) if quota[count].kernels]:
        for role in Role:
            spent = len(stage.compiled[role]) - len(spaces[role].configs)
            search = _search(stage, strategy, seed, spaces[role], count, carried_over(quota, count, spent))
            late[role, count] = _survey(stage, role, count, search)
    races: list[Found] = []
    for count in order(tokens):
        for role in Role:
            for config in late.get((role, count), ()):
                stage.screen(role, count, config)
            tried = len(memory.log.times_us(role, count))
            rest = Quota(trials=max(quota[count].trials - tried, FEWEST_TRIALS), kernels=0)
            _survey(stage, role, count, _search(stage, strategy, seed, spaces[role], count, rest))
            races.append(_end(stage, role, count))
    seconds = max(stage.seconds, stage.compile_s)
    return Rehearsal(tuple(races), sum(map(len, stage.compiled.values())), seconds)


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


def _search(stage: _Stage, strategy: StrategyFactory, seed: int, space: Space, tokens: int, quota: Quota) -> Strategy:
    terrain = stage.memory.terrain(space, stage.compiled[space.role], tokens, quota)
    return strategy(_answered(terrain, stage.truth.answers[space.role, tokens]), seed)


def _survey(stage: _Stage, role: Role, tokens: int, strategy: Strategy) -> list[MoEKernelConfig]:
    """Time what the search asks for; return what it has compiled instead, which is timed later."""
    late: list[MoEKernelConfig] = []
    while asked := strategy.ask(BATCH):
        fresh = [config for config in asked if config not in stage.compiled[role]]
        stage.compile(role, fresh)
        late += fresh
        for config in [config for config in asked if config not in fresh]:
            strategy.tell(config, stage.screen(role, tokens, config))
    return late


def _end(stage: _Stage, role: Role, tokens: int) -> Found:
    times = {config: us for config, us in stage.memory.log.times_us(role, tokens).items() if us < inf}
    tried, recorded = len(stage.memory.log.times_us(role, tokens)), len(stage.truth.answers[role, tokens])
    return Found(role, tokens, _regret(stage, role, tokens, times), tried, recorded)


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
