"""The live backend of a sweep: compiles here, measures in a GPU process that may die without ending the sweep."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from moetune.engine.backend import Ceilings, Entered, EntryTerms, Kernel, LayerFigures
from moetune.measure.ahead import Ahead
from moetune.measure.card import CardState
from moetune.measure.compiles import Compiles, LentCompiles
from moetune.measure.gpu_messages import GpuSettings, Start
from moetune.measure.gpu_respawn import MAX_FRUITLESS, NO_HEAD_START, OPEN, HeadStart, RespawningGpu, gone
from moetune.measure.isolated_limits import Limits, TimeLimits
from moetune.measure.strikes import Strikes
from moetune.measure.sweep_counters import SweepCounters
from moetune.outcome import ClockSpan, Compiled, Failed, Outcome, over_all
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

CUDA_TRIALS = "moetune.measure.cuda:open_trials"
PROBE_ROUNDS = 2  # of a plan alone, to see whether it was the one; rounds are even

Row = dict[LayerPlan, Outcome]


def open_isolated(
    settings: GpuSettings, device: DeviceInfo | None, tokens: Sequence[int], ahead: Ahead | None = None
) -> IsolatedBackend:
    """Return the backend of a live sweep: kernels compile in a pool of processes, and run in one of their own.

    Both are started and not waited for; nothing touches the GPU before ``begin`` or the first question.

    Args:
        settings: what the trials are made from.
        device: the GPU as its driver describes it; None waits for the GPU process where it is needed.
        tokens: the sweep's token counts in the order of their turns.
        ahead: processes that were started already.
    """
    from moetune.measure.kernel_compiles import KernelCompiles

    process, pool = (None, None) if ahead is None else (ahead.gpu, ahead.pool)
    compiles = KernelCompiles(settings.shape, tokens=tokens, pool=pool)
    return IsolatedBackend(settings, compiles, factory=CUDA_TRIALS, given=HeadStart(device=device, process=process))


class IsolatedBackend:
    """Answers trials through a GPU process. See :class:`moetune.engine.backend.Backend` for the order of calls.

    Whatever a candidate does to its process (an illegal access, a hang, an abort, all of the host's memory) costs that
    candidate: it comes back as failed, and the next question starts a new process, which opens the same token count
    with the same seeds. A candidate that did it twice is not launched again. This process never starts CUDA.

    Args:
        settings: what the trials are made from.
        compiles: who compiles; closed with this backend.
        factory: ``module:function`` that makes the trials in the GPU process.
        limits: seconds of each question, :class:`TimeLimits` when None.
        given: what is there already, the device as its driver describes it above all; without that the GPU process is
            waited for where it is needed.

    Raises:
        RunError: the GPU process cannot be started. What its factory raises (there is no such GPU) comes with the first
            question or the device.
    """

    def __init__(
        self,
        settings: GpuSettings,
        compiles: Compiles,
        *,
        factory: str = CUDA_TRIALS,
        limits: Limits | None = None,
        given: HeadStart = NO_HEAD_START,
    ) -> None:
        self._settings, self._compiles, self._factory = settings, compiles, factory
        self._limits = limits or TimeLimits(settings.shape)
        self._strikes = Strikes()
        self._readings: dict[int, ClockSpan] = {}  # what each process saw, by its id
        self._counters = SweepCounters(settings.shape, settings.device_index, settings.routing)
        try:
            start = Start(factory=factory, settings=settings)
            self._gpu = RespawningGpu(start, self._limits, given)
        except BaseException:
            compiles.close()
            raise

    def beside(self, device_index: int, device: DeviceInfo) -> IsolatedBackend:
        """Return a backend of another GPU of the same model: this one's compilers, ceilings and reports serve both.

        Its GPU process is started and not waited for. Two threads may ask the two at once, for anything but compiles.

        Args:
            device_index: of the other GPU.
            device: what its driver says, the same as of this one.
        """
        settings, lent = replace(self._settings, device_index=device_index), LentCompiles(self._compiles)
        given = HeadStart(device=device, news=self._gpu.news)
        return IsolatedBackend(settings, lent, factory=self._factory, limits=self._limits, given=given)

    def begin(self) -> None:
        """Let the GPU process use the GPU, from when on it must be this sweep's own; does not wait for it."""
        self._gpu.begin()

    def when_ready(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` once, as soon as the GPU process is waited for and there: before the next question is put."""
        self._gpu.when_ready(tell)

    @property
    def name(self) -> str:
        """What the table's ``backend`` field says."""
        return "cuda"

    @property
    def device(self) -> DeviceInfo:
        """The GPU that answers."""
        return self._gpu.device

    @property
    def shape(self) -> MoEShape:
        """The layer that is tuned."""
        return self._settings.shape

    def recorded(self, role: Role) -> Sequence[MoEKernelConfig] | None:
        """Return None: any config can be timed."""
        del role

    def recorded_plans(self, tokens: int) -> Sequence[LayerPlan]:
        """Return nothing: any plan can be timed."""
        del tokens
        return ()

    # Compiling, in other processes: none of these waits for the GPU process.

    def submit(self, kernels: Iterable[Kernel]) -> None:
        """Queue kernels to be compiled, in their order, and return at once."""
        self._compiles.submit(kernels, self.device)

    def ended(self, wait_s: float = 0.0) -> Sequence[tuple[Kernel, Compiled | Failed]]:
        """Return the queued kernels that ended since the last call."""
        found = self._compiles.ended(wait_s)
        self._gpu.news.add((kernel, result) for kernel, result in found if isinstance(result, Compiled))
        return found

    def withdraw(self) -> Sequence[Kernel]:
        """Take back the queued kernels that no process has begun."""
        return self._compiles.withdraw()

    # Questions: a new method of the trials is one line here.

    def ceilings(self) -> Ceilings:
        """Measure a large copy and a large matmul, once per sweep.

        Raises:
            RunError: the GPU cannot run even these.
        """
        found = self._gpu.news.ceilings
        if found is None:
            found = self._gpu.news.ceilings = self._needed("ceilings")
        return found

    def open(self, tokens: int) -> Failed | None:
        """Make rows and the float32 reference for one token count, and the weights where the process is new."""
        self._note_clocks()
        return self._trial((OPEN, tokens), OPEN, tokens)

    def bound_us(self) -> float:
        """Return the physical bound of the open token count, from the experts that its rows really touch."""
        self.ceilings()
        return self._needed("bound_us")

    def enter_kernels(self, role: Role, configs: Sequence[MoEKernelConfig], terms: EntryTerms) -> Generator[Entered]:
        """Let kernels into a race one after the other; the process holds them against each other."""
        with closing(self._each("enter_kernels", role, configs, lambda: (terms,))) as ends:
            for end in ends:
                entered = Entered(None, end) if isinstance(end, Failed) else end
                if entered.first_us is not None:
                    terms = terms.after(entered.first_us)  # for a new process, which has seen none of them
                yield entered

    def verify_kernels(self, role: Role, configs: Sequence[MoEKernelConfig]) -> Generator[Failed | None]:
        """Compare each with the float32 reference over NaN-poisoned output."""
        return self._each("verify_kernels", role, configs)

    def time_kernels(self, role: Role, configs: Sequence[MoEKernelConfig], samples: int) -> Generator[Outcome]:
        """Time each with a cold L2."""
        return self._each("time_kernels", role, configs, lambda: (samples,))

    def time_and_recheck_kernels(
        self, role: Role, configs: Sequence[MoEKernelConfig], samples: int
    ) -> Generator[Outcome]:
        """Time each, and compare what its launches left."""
        return self._each("time_and_recheck_kernels", role, configs, lambda: (samples,))

    def time_routing(self, block_m: int) -> Outcome:
        """Time route and permute for one ``block_m``."""
        return self._trial(("routing", block_m), "time_routing", block_m)

    def time_combine(self) -> Outcome:
        """Time the combine kernel."""
        return self._trial("combine", "time_combine")

    def time_layers(self, plans: Sequence[LayerPlan], rounds: int) -> Sequence[Outcome]:
        """Time whole layers, interleaved; a plan that ends the process is found and fails alone."""
        (row,) = self._together("time_layers", plans, rounds)
        return row

    def time_rerouted(self, plans: Sequence[LayerPlan], rounds: int) -> Sequence[Sequence[Outcome]]:
        """Time whole layers under routings that touch other numbers of experts, the fewest first."""
        return self._together("time_rerouted", plans, rounds)

    def verify_layer(self, plan: LayerPlan) -> Failed | None:
        """Compare the whole layer with the reference on rows of another seed."""
        return self._trial(plan, "verify_layer", plan)

    def prepare_counters(self) -> None:
        """Start the worker that counts ahead: it waits for ``counters`` without touching the GPU."""
        self._counters.prepare(self.device)

    def counters(self, plans: dict[int, LayerPlan], limit_s: float = 120.0) -> dict[int, LayerFigures | Failed]:
        """Read hardware counters for each token count's plan; ends the GPU process first, whose room is needed."""

        def make_room() -> None:
            self._note_clocks()
            self._gpu.end()

        return self._counters.read(plans, self.device, limit_s, make_room)

    def card(self) -> CardState | None:
        """Return what else ran on the GPU, and whether it was throttled, before this sweep used it; ask it first."""
        return self._gpu.ask("card").value

    def clocks(self) -> ClockSpan | None:
        """Return the clocks, heat and power seen while timing, lowest and highest; None before the first look."""
        self._note_clocks()
        return over_all(self._readings.values())

    def close(self) -> None:
        """End the GPU process, at once, and the compile processes; safe to call twice, and while another thread asks."""
        try:
            self._counters.close()
            self._gpu.close()
        finally:
            self._compiles.close()

    # one question

    def _trial(self, candidate: Hashable, method: str, *arguments: Any) -> Any:
        """Ask about one candidate; Failed when it ended its process, or did so too often before."""
        refusal = self._strikes.refusal(candidate)
        if refusal is not None:
            return refusal
        answer = self._gpu.ask(method, *arguments)
        if answer.lost is None:
            return answer.value
        self._strikes.add(candidate, answer.lost)
        return answer.value if isinstance(answer.value, Failed) else answer.lost

    def _each(
        self,
        method: str,
        role: Role,
        configs: Sequence[MoEKernelConfig],
        more: Callable[[], tuple[Any, ...]] = tuple,
    ) -> Generator[Any]:
        """Ask about kernels in one question, and yield the answer about each as it comes.

        The one that a process had in hand when it ended is Failed; those behind it are asked about anew.
        """
        place = 0
        while place < len(configs):
            refusal = self._strikes.refusal((role, configs[place]))
            if refusal is not None:
                place += 1
                yield refusal
                continue
            good = itertools.takewhile(lambda one: self._strikes.refusal((role, one)) is None, configs[place:])
            with closing(self._gpu.ask_each(method, role, list(good), *more())) as answers:
                for answer in answers:
                    if answer.lost is not None:
                        self._strikes.add((role, configs[place]), answer.lost)
                    place += 1
                    yield answer.value if answer.lost is None or isinstance(answer.value, Failed) else answer.lost

    def _needed(self, method: str) -> Any:
        """Ask what no candidate can be blamed for, and the sweep cannot go on without."""
        lost: Failed | None = None
        for _ in range(MAX_FRUITLESS):
            answer = self._gpu.ask(method)
            if answer.lost is None:
                return answer.value
            lost = answer.lost
        assert lost is not None
        raise gone(lost)

    # several plans at once

    def _together(self, method: str, plans: Sequence[LayerPlan], rounds: int) -> list[list[Outcome]]:
        """Return one row of outcomes per routing; plans that end the process fail, the others are timed together."""
        failed = {plan: refusal for plan in plans if (refusal := self._strikes.refusal(plan)) is not None}
        rows: list[Row] = []
        deaths = 0
        while todo := [plan for plan in dict.fromkeys(plans) if plan not in failed]:
            answer = self._gpu.ask(method, todo, rounds)
            found = _rows(method, todo, answer.value)
            if answer.lost is None:
                rows = found
                break
            named = {plan for row in found for plan, outcome in row.items() if outcome == answer.lost}
            if len(todo) == 1 or len(named) == 1:
                plan = next(iter(named), todo[0])
                failed[plan] = answer.lost
                self._strikes.add(plan, answer.lost)
                continue
            deaths += 1
            # Nobody knows whose fault it was. Where all behave alone and the next time together ends the same way,
            # what each does alone is all that there is.
            alone = {plan: self._alone(method, plan, PROBE_ROUNDS if deaths == 1 else rounds) for plan in todo}
            failed |= {plan: outcome for plan, outcome in alone.items() if isinstance(outcome, Failed)}
            if deaths > 1:
                rows = _merged([outcome for outcome in alone.values() if not isinstance(outcome, Failed)])
                break
        if not rows and len(failed) == len(set(plans)):
            rows = [{}]
        return [[failed[plan] if plan in failed else row[plan] for plan in plans] for row in rows]

    def _alone(self, method: str, plan: LayerPlan, rounds: int) -> list[Row] | Failed:
        """Time one plan by itself; Failed when it ends the process, which then was its second time."""
        answer = self._gpu.ask(method, [plan], rounds)
        if answer.lost is None:
            return _rows(method, [plan], answer.value)
        self._strikes.add(plan, answer.lost, 2)
        return answer.lost

    def _note_clocks(self) -> None:
        """Ask the process for its readings, where there is one that has any."""
        self._gpu.settle()  # or a new one would be started, and be asked what it cannot know
        pid = self._gpu.pid
        if pid is not None and self._gpu.has_answered:
            reading = self._gpu.ask("clocks").value
            if reading is not None:
                self._readings[pid] = reading


def _rows(method: str, plans: Sequence[LayerPlan], value: Any) -> list[Row]:
    """Return what one of the two methods about several plans answered as rows; none where it did not answer."""
    if value is None:
        return []
    return [dict(zip(plans, row, strict=True)) for row in ([value] if method == "time_layers" else value)]


def _merged(singles: Sequence[list[Row]]) -> list[Row]:
    """Join the rows of plans that were timed apart."""
    return [{plan: outcome for row in rows for plan, outcome in row.items()} for rows in zip(*singles, strict=True)]
