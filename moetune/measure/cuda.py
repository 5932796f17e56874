"""Trials on the GPU of this process, and the live backend that also compiles, in other processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from moetune.engine.backend import Ceilings, Kernel, KernelByKernel, LayerFigures
from moetune.errors import MissingError, RunError
from moetune.measure.calls import DTYPES
from moetune.measure.card import CardState, card_state
from moetune.measure.ceilings import measure_ceilings
from moetune.measure.clocks import Clocks, ClockWatch
from moetune.measure.faults import failure, is_sticky
from moetune.measure.figures import IssueRate, measured, timed_only, warp_instructions
from moetune.measure.gpu_messages import GpuSettings
from moetune.measure.inputs import (
    ExpertWeights,
    kernel_truth,
    make_rows,
    make_weights,
    rows_seed,
    token_bytes,
    weights_bytes,
    why_no_room,
)
from moetune.measure.kernel_compiles import KernelCompiles
from moetune.measure.kernel_jobs import gemm_job
from moetune.measure.layer_graphs import LayerGraphs
from moetune.measure.odd import OddProblems
from moetune.measure.open_count import ODD_SEED_OFFSET, OpenCount
from moetune.measure.router import router_of
from moetune.measure.stopwatch import Stopwatch, question
from moetune.measure.sweep_counters import COUNTERS_LIMIT_S, SweepCounters
from moetune.measure.timer import CapturedLayers, Launch, Replay, Timer, finish
from moetune.models import roofline
from moetune.models.roofline import Work, kernel_work, layer_work, nominal_peaks
from moetune.models.routing import UNIFORM, Routing
from moetune.outcome import TIME_DIGITS, ClockSpan, Compiled, Failed, FailureKind, Figure, Outcome, summarize
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo, device_info
from moetune_kernels.kernel_call import launch_all
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

SMALL_SAMPLES = 15  # route, permute and combine: short and few, so cheap to time well

NOT_TIMED = Failed(FailureKind.LAUNCH, "not timed: another plan of the same round stopped the GPU")
Value = TypeVar("Value")
Check = Callable[[Sequence[torch.Tensor]], Sequence[Failed | None]]


class CudaTrials(KernelByKernel):
    """Times and verifies on one CUDA device in this process: all of a backend but compiling and counting.

    A trial may lose the device for good (an illegal access, a kernel that never ends): that trial comes back as failed,
    ``lost`` says why, and nothing more can be asked of this process.

    Args:
        shape: the layer; bf16 or fp16 weights.
        device_index: the CUDA device, as torch counts it.
        seed: of weights and rows.
        routing: how the rows choose experts.

    Raises:
        MissingError: torch sees no CUDA device.
        UsageError: the routing is a trace that cannot be used for this layer.
    """

    def __init__(self, shape: MoEShape, device_index: int = 0, *, seed: int = 0, routing: Routing = UNIFORM) -> None:
        if not torch.cuda.is_available():
            raise MissingError("no CUDA GPU in this machine; `moetune doctor` says what works without one")
        self._info = device_info(device_index)
        self._shape, self._index, self._seed = shape, device_index, seed
        self._routing, self._router = routing, router_of(routing, shape, seed)
        self._device = torch.device("cuda", device_index)
        clocks = Clocks.of_device(device_index)
        self._card = card_state(clocks)  # before the next line puts a context of our own on the GPU
        torch.cuda.set_device(self._device)
        torch.set_float32_matmul_precision("highest")  # the references are float32, never TF32
        self._watch = ClockWatch(clocks)
        self._timer = Timer(self._device, self._info.l2_bytes)
        self._side_stream = torch.cuda.Stream(self._device)  # graphs cannot be captured on the default stream
        self._compiled: dict[tuple[Role, MoEKernelConfig], Compiled] = {}
        self._weights: ExpertWeights | None = None
        self._odd: OddProblems | None = None
        self._open: OpenCount | None = None
        self._graphs = self._new_graphs()  # of the open token count, from heat to heat
        self._ceilings: Ceilings | None = None
        self._lost: Failed | None = None
        self.stopwatch = Stopwatch()

    @property
    def device(self) -> DeviceInfo:
        """The GPU that answers."""
        return self._info

    def card(self) -> CardState:
        """Return what else ran on the GPU, and whether it was throttled, before this process used it."""
        return self._card

    @property
    def lost(self) -> Failed | None:
        """The trial that lost the device, None while it answers."""
        return self._lost

    def busy(self) -> float:
        """Return the seconds that the GPU spent on timed rounds, flushes included, by its own clock.

        Checks are not counted: between their many small launches the GPU waits for the host.
        """
        return self._timer.busy_s

    def asked(self) -> float:
        """Return the seconds of the host's clock that all questions so far took."""
        return self.stopwatch.total_s

    def learn(self, compiled: Mapping[tuple[Role, MoEKernelConfig], Compiled], ceilings: Ceilings | None) -> None:
        """Take over what others found out: what the compiler said of kernels, and the device's limits."""
        self._compiled.update(compiled)
        self._ceilings = ceilings or self._ceilings

    @question
    def ceilings(self) -> Ceilings:
        """Measure a large copy (read and written bytes) and a large matmul in the format of the weights.

        Raises:
            RunError: the GPU cannot run even these.
        """
        if self._ceilings is None:
            dtype = DTYPES[self._shape.format]
            found = self._answer(lambda: measure_ceilings(self._timer, self._device, dtype))
            if isinstance(found, Failed):
                raise RunError(f"could not measure the GPU's own limits: {found.reason}")
            self._ceilings = found
        return self._ceilings

    @question
    def open(self, tokens: int) -> Failed | None:
        """Make rows and the float32 reference for one token count, and the weights before the first."""
        self._drop_graphs()
        self._open = None
        opened = self._answer(lambda: self._make_open(tokens))
        return opened if isinstance(opened, Failed) else None

    def _make_open(self, tokens: int) -> OpenCount | Failed:
        torch.cuda.empty_cache()  # the last count's blocks have other sizes
        weights = self._all_weights()
        if isinstance(weights, Failed):
            return weights
        what = f"{tokens} tokens of {self._shape.key} and their float32 reference"
        no_room = why_no_room(token_bytes(self._shape, tokens), what, self._device)
        if no_room is not None:
            return no_room
        seed = rows_seed(self._seed, tokens)
        truth = kernel_truth(self._shape, weights, make_rows(self._shape, tokens, self._device, seed, self._router))
        self._odd = self._odd or OddProblems(self._shape, weights, self._seed + ODD_SEED_OFFSET)
        self._open = OpenCount(self._shape, weights, truth, seed, self._odd, self._router)
        finish()
        return self._open

    def _all_weights(self) -> ExpertWeights | Failed:
        if self._weights is None:
            what = f"the weights of {self._shape.key}"
            no_room = why_no_room(weights_bytes(self._shape), what, self._device)
            if no_room is not None:
                return no_room
            self._weights = make_weights(self._shape, self._device, self._seed)
        return self._weights

    @question
    def bound_us(self) -> float:
        """Return the physical bound of the open token count, from the experts that its rows really touch."""
        ceilings = self.ceilings()
        return roofline.bound_us(self._layer_work(), ceilings.bytes_per_s, ceilings.flops)

    @question
    def first_launch_us(self, role: Role, config: MoEKernelConfig) -> float | Failed:
        """Load the kernel, then time its very first launch, cold."""

        def launch_once() -> float:
            calls = self._now_open.gemm(role, config)
            for call in calls:
                _ = call.warmup().run  # reading it loads the binary onto the GPU, so that the launch only launches
            return self._timer.once(lambda: launch_all(calls))

        return self._answer(launch_once)

    @question
    def time_kernel(self, role: Role, config: MoEKernelConfig, samples: int) -> Outcome:
        """Time one kernel with a cold L2; a permuted copy that it needs is part of its time."""

        def run() -> Outcome:
            opened = self._now_open
            sample = self._timer.sample(opened.timed_gemm(role, config), samples)
            work = kernel_work(
                self._shape, opened.tokens, role, touched_experts=opened.truth.touched, slots=opened.truth.routed
            )
            counted_instructions = self._instructions(role, config)
            return measured(sample, work, self._issue_rate().efficiency(counted_instructions, sample.median_us))

        return self._answer(run)

    def _instructions(self, role: Role, config: MoEKernelConfig) -> float | None:
        if (role, config) not in self._compiled:  # compiled in an earlier, interrupted run
            kernel = self._now_open.gemm(role, config)[-1].warmup()
            report = gemm_job(role, config, self._shape, self._info).report(kernel)
            if isinstance(report, Failed):
                return None
            self._compiled[role, config] = report
        compiled = self._compiled[role, config]
        return warp_instructions(compiled, config, self._shape, role, self._now_open.truth.counts)

    @question
    def verify_kernel(self, role: Role, config: MoEKernelConfig) -> Failed | None:
        """Compare with the float32 reference over NaN-poisoned output."""
        return self._answer(lambda: self._now_open.verify_gemm(role, config))

    @question
    def recheck_kernel(self, role: Role, config: MoEKernelConfig) -> Failed | None:
        """Compare what the timed launches left, and bursts of the same kernel."""
        return self._answer(lambda: self._now_open.recheck_gemm(role, config))

    @question
    def time_routing(self, block_m: int) -> Outcome:
        """Time route and permute for one ``block_m``."""
        work = roofline.routing_work(self._shape, self._now_open.tokens)
        return self._time_small(lambda: self._now_open.routing(block_m), work)

    @question
    def time_combine(self) -> Outcome:
        """Time the combine kernel."""
        work = roofline.combine_work(self._shape, self._now_open.tokens)
        return self._time_small(self._now_open.combine, work)

    def _time_small(self, make: Callable[[], Launch], work: Work) -> Outcome:
        def run() -> Outcome:
            graphs, launch = CapturedLayers(self._side_stream), make()  # kept: its graph writes to tensors of its own
            try:
                (times,) = self._timer.rounds([graphs.capture(launch)], SMALL_SAMPLES)
            finally:
                graphs.close()
            no_issue = Figure.unavailable("instructions of the small kernels are not counted")
            return measured(summarize(times), work, no_issue)

        return self._answer(run)

    @question
    def time_layers(self, plans: Sequence[LayerPlan], rounds: int) -> Sequence[Outcome]:
        """Time whole layers by graph replay, interleaved; a plan that fails or whose last replay is wrong fails alone."""
        timed = self._layer_times(plans, rounds, check=self._recheck_layers)
        return [
            times if isinstance(times, Failed) else self._layer_outcome(plan, times)
            for plan, times in zip(plans, timed, strict=True)
        ]

    def _recheck_layers(self, outs: Sequence[torch.Tensor]) -> Sequence[Failed | None]:
        return self._now_open.recheck_layers(outs)

    @question
    def time_rerouted(self, plans: Sequence[LayerPlan], rounds: int) -> Sequence[Sequence[Outcome]]:
        """Time whole layers under routings that touch other numbers of experts, the fewest first."""
        self._drop_graphs()  # the heats are over, and these graphs need as much memory again
        routings = self._answer(self._now_open.other_routings)
        if isinstance(routings, Failed):
            return [[routings] * len(plans)]
        return [
            [
                times if isinstance(times, Failed) else timed_only(times)
                for times in self._layer_times(plans, rounds, logits, check=lambda outs: [None] * len(outs))
            ]
            for logits in routings
            if self._lost is None
        ]

    def _layer_times(
        self, plans: Sequence[LayerPlan], rounds: int, logits: torch.Tensor | None = None, *, check: Check
    ) -> list[list[float] | Failed]:
        """Return each plan's times, or why it has none; ``check`` judges what its last replay left."""
        graphs = self._graphs if logits is None else self._new_graphs()
        graphs.only(plans)
        replays = [self._capture(graphs, plan, logits) for plan in plans]
        good = [replay for replay in replays if not isinstance(replay, Failed)]
        timed = self._answer(lambda: self._rounds(good, rounds)) if good and self._lost is None else []
        ends = itertools.repeat(timed) if isinstance(timed, Failed) else iter(self._checked(timed, check))
        outcomes = [replay if isinstance(replay, Failed) else next(ends, NOT_TIMED) for replay in replays]
        if self._lost is None and logits is not None:
            graphs.close()
        return outcomes

    def _new_graphs(self) -> LayerGraphs:
        return LayerGraphs(lambda: CapturedLayers(self._side_stream))

    def _drop_graphs(self) -> None:
        if self._lost is None:
            self._graphs.close()

    def _rounds(self, replays: Sequence[Replay], rounds: int) -> list[tuple[list[float], torch.Tensor]]:
        """Time graphs against each other over poisoned outputs, and look at the clocks while they run.

        Returns:
            The times of each and a copy of what its last replay left, made before another graph wrote over it.
        """
        nan = float("nan")
        for replay in replays:
            replay.output.fill_(nan)
        left = [torch.empty_like(replay.output) for replay in replays]  # each is copied to behind its last replay
        self._watch.mark()
        times = self._timer.rounds(
            replays, rounds, self._watch.look, lambda place: left[place].copy_(replays[place].output)
        )
        return list(zip(times, left, strict=True))

    def _checked(
        self, timed: Sequence[tuple[list[float], torch.Tensor]], check: Check
    ) -> Sequence[list[float] | Failed]:
        """Return each plan's times, or what is wrong with what its last replay left."""
        if not timed:
            return []
        found = self._answer(lambda: check([left for _, left in timed]))
        if isinstance(found, Failed):  # the comparison itself failed: nobody knows which of them are right
            return [found] * len(timed)
        return [wrong or times for (times, _), wrong in zip(timed, found, strict=True)]

    def _capture(self, graphs: LayerGraphs, plan: LayerPlan, logits: torch.Tensor | None) -> Replay | Failed:
        if self._lost is not None:  # in this very call: the plan that did it must come back as failed
            return NOT_TIMED
        return self._answer(lambda: graphs.replay(plan, self._now_open.layer(plan, logits)))

    def _layer_outcome(self, plan: LayerPlan, times_us: list[float]) -> Outcome:
        rounds_us = tuple(
            round(time_us, TIME_DIGITS) for time_us in times_us
        )  # as they are stored, so replays decide alike
        sample = summarize(rounds_us)
        parts = [self._instructions(role, plan.config(role)) for role in Role]
        known = [part for part in parts if part is not None]
        total = sum(known) if len(known) == len(parts) else None
        note = "the two GEMMs' instructions; routing and combine are not counted" if total is not None else None
        issue = self._issue_rate().efficiency(total, sample.median_us, note)
        timed = measured(sample, self._layer_work(), issue)
        return replace(timed, times_us=rounds_us, clocks=self._watch.since_mark())

    @question
    def verify_layer(self, plan: LayerPlan) -> Failed | None:
        """Compare the whole layer with the reference on rows of another seed and on odd routings."""
        return self._answer(lambda: self._now_open.verify_layer(plan))

    def clocks(self) -> ClockSpan | None:
        """Return the clocks, heat and power seen while timing, lowest and highest; None before the first look."""
        return self._watch.whole()

    def close(self) -> None:
        """Free the GPU's memory; safe to call twice."""
        self._watch.close()
        if self._lost is None:
            self._release()

    def _release(self) -> None:
        self._drop_graphs()
        self._open = self._odd = self._weights = None
        torch.cuda.empty_cache()

    @property
    def _now_open(self) -> OpenCount:
        assert self._open is not None, "open a token count first"
        return self._open

    def _layer_work(self) -> Work:
        opened = self._now_open
        return layer_work(self._shape, opened.tokens, touched_experts=opened.truth.touched, slots=opened.truth.routed)

    def _issue_rate(self) -> IssueRate:
        """Return the rate at the SM clock that NVML gave last, while timing, or at the nominal boost clock."""
        sm_mhz, peaks = self._watch.look().sm_mhz, nominal_peaks(self._info)
        clock_hz = sm_mhz * 1e6 if sm_mhz else (peaks.sm_clock_hz if peaks else None)
        return IssueRate(self._info.sm_count, clock_hz)

    def _answer(self, ask: Callable[[], Value]) -> Value | Failed:
        """Run one question on the GPU; whatever it raises is a failed trial, and a lost device ends the run.

        Raises:
            RunError: an earlier trial lost the device.
        """
        if self._lost is not None:
            raise RunError(
                f"the GPU stopped after a trial that failed ({self._lost.reason}); every trial so far is kept: "
                "run the same command again, it goes on from there"
            )
        try:
            answer = ask()
            if not isinstance(answer, Failed):
                return answer
        except Exception as error:  # noqa: BLE001  # a kernel may fail in any way, and the sweep must go on
            return self._fault(error)
        return answer

    def _fault(self, error: Exception) -> Failed:
        failed = failure(error)
        sticky = is_sticky(error)
        if not sticky:
            try:
                finish()
            except Exception as after:  # noqa: BLE001  # the error shows only now, or the device is gone
                failed, sticky = failure(after), True
        if sticky:
            self._lost = failed
        elif failed.kind is FailureKind.RESOURCES:
            torch.cuda.empty_cache()  # what other sizes left behind may be the room that was missing
        return failed


class CudaBackend(CudaTrials):
    """Answers trials in this very process. See :class:`moetune.engine.backend.Backend` for the order of calls.

    A fault of the GPU ends it: a sweep uses :class:`moetune.measure.isolated.IsolatedBackend`.

    Args:
        shape: the layer; bf16 or fp16 weights.
        device_index: the CUDA device, as torch counts it.
        seed: of weights and rows.
        routing: how the rows choose experts.
        workers: compile processes; one less than the cores when None.

    Raises:
        MissingError: torch sees no CUDA device.
        UsageError: the routing is a trace that cannot be used for this layer.
    """

    def __init__(
        self,
        shape: MoEShape,
        device_index: int = 0,
        *,
        seed: int = 0,
        routing: Routing = UNIFORM,
        workers: int | None = None,
    ) -> None:
        super().__init__(shape, device_index, seed=seed, routing=routing)
        self._compiles = KernelCompiles(shape, workers)
        self._counters = SweepCounters(shape, device_index, routing)

    @property
    def name(self) -> str:
        """What the table's ``backend`` field says."""
        return "cuda"

    @property
    def shape(self) -> MoEShape:
        """The layer that is tuned."""
        return self._shape

    def recorded(self, role: Role) -> Sequence[MoEKernelConfig] | None:
        """Return None: any config can be timed."""
        del role

    def recorded_plans(self, tokens: int) -> Sequence[LayerPlan]:
        """Return nothing: any plan can be timed."""
        del tokens
        return ()

    def submit(self, kernels: Iterable[Kernel]) -> None:
        """Queue kernels to be compiled in other processes, in their order, and return at once."""
        self._compiles.submit(kernels, self._info)

    def ended(self, wait_s: float = 0.0) -> Sequence[tuple[Kernel, Compiled | Failed]]:
        """Return the queued kernels that ended since the last call."""
        found = self._compiles.ended(wait_s)
        self._compiled.update((kernel, result) for kernel, result in found if isinstance(result, Compiled))
        return found

    def withdraw(self) -> Sequence[Kernel]:
        """Take back the queued kernels that no process has begun."""
        return self._compiles.withdraw()

    def prepare_counters(self) -> None:
        """Start the worker that counts ahead: it waits for ``counters`` without touching the GPU."""
        self._counters.prepare(self._info)

    def counters(
        self, plans: dict[int, LayerPlan], limit_s: float = COUNTERS_LIMIT_S
    ) -> dict[int, LayerFigures | Failed]:
        """Read hardware counters for each token count's plan; frees the weights first, whose room is needed."""
        return self._counters.read(plans, self._info, limit_s, self._release)

    def close(self) -> None:
        """End the compile processes and free the GPU's memory; safe to call twice."""
        self._counters.close()
        self._compiles.close()
        super().close()


def open_trials(settings: GpuSettings) -> CudaTrials:
    """Return the trials of ``settings``: what a GPU process is started with."""
    return CudaTrials(settings.shape, settings.device_index, seed=settings.seed, routing=settings.routing)
