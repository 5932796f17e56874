"""A GPU that is not there: deterministic times, and failures on demand."""

from __future__ import annotations

from collections import Counter
from zlib import crc32

import pytest

from moetune.engine.backend import Ceilings, KernelByKernel
from moetune.engine.budget import CLOSING_S, CLOSING_SHARE, Budget
from moetune.outcome import Compiled, Failed, FailureKind, Figure, Measured
from moetune.space.prior import Problem, predict
from moetune.store.codec import choice_text
from moetune_kernels.config import Role
from moetune_kernels.device import TARGETS
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=1024, inter=512, local_experts=8, top_k=2)
DEVICE = TARGETS["sm_90"]
NONE = Figure.unavailable("a fake GPU counts nothing")


def measured(median_us, spread_us=None, samples=20):
    spread_us = 0.001 * median_us if spread_us is None else spread_us
    return Measured(
        median_us=median_us,
        spread_us=spread_us,
        samples=samples,
        flops_per_byte=NONE,
        bandwidth_gbps=NONE,
        issue_efficiency=NONE,
    )


def budget_of(working_s, clock):
    """A budget of which so many seconds are for work; what the end takes comes on top."""
    return Budget((working_s + CLOSING_S) / (1.0 - CLOSING_SHARE), clock)


class MemoryJournal:
    """Keeps what a store would keep."""

    def __init__(self):
        self.trials, self.bounds, self.ceilings = [], {}, None

    def record(self, trial):
        self.trials.append(trial)

    def record_bound(self, tokens, bound_us):
        self.bounds[tokens] = bound_us

    def record_ceilings(self, bytes_per_s, flops):
        self.ceilings = (bytes_per_s, flops)


class FakeBackend(KernelByKernel):
    """Times follow the space's own guess with a bump of up to 20% per config; hooks make single trials fail."""

    name = "cuda"

    def __init__(self, shape=SHAPE, device=DEVICE, **hooks):
        self.shape, self.device, self.hooks = shape, device, hooks
        self.calls = Counter()
        self.journal = MemoryJournal()  # where a test that needs no store keeps this GPU's trials
        self.tokens = 0
        self.opened, self.launched, self.queued = [], [], []

    def hook(self, name, *args):
        return self.hooks[name](*args) if name in self.hooks else None

    def kernel_us(self, role, config):
        planted = self.hook("kernel_us", role, config, self.tokens)
        if planted is not None:
            return planted
        guess = predict(config, Problem(self.shape, self.device, role), self.tokens) / 1e6
        luck = 0.2 * (crc32(f"{role.value} {self.tokens} {choice_text(config)}".encode()) % 997) / 997
        return round(guess * (1.0 + luck), 4)  # as a store keeps it, so that a sweep which continues sees the same

    def ceilings(self):
        return Ceilings(bytes_per_s=4.2e12, flops=8.0e14)

    def recorded_plans(self, tokens):
        return ()

    def recorded(self, role):
        return None

    def submit(self, kernels):
        self.queued += kernels

    def ended(self, wait_s=0.0):
        kernels, self.queued = self.queued, []
        return [(kernel, self.compiler_says(*kernel)) for kernel in kernels]

    def withdraw(self):
        kernels, self.queued = self.queued, []
        return kernels

    def compiler_says(self, role, config):
        self.calls["compile"] += 1
        report = Compiled(registers=128, spills=0, smem_bytes=4096, block_size=config.block_size)
        return self.hook("compile", role, config) or report

    def open(self, tokens):
        self.opened.append(tokens)
        self.tokens = tokens
        return self.hook("open", tokens)

    def bound_us(self):
        return 1.0 + self.tokens / 100

    def time_kernel(self, role, config, samples):
        self.calls["time_kernel"] += 1
        self.calls["time_kernel", self.tokens] += 1
        return self.hook("time_kernel", role, config) or measured(self.kernel_us(role, config), samples=samples)

    def first_launch_us(self, role, config):
        self.calls["first_launch"] += 1
        self.calls["first_launch", self.tokens] += 1
        self.launched.append((role, config, self.tokens))
        return self.hook("first_launch", role, config) or 1.3 * self.kernel_us(role, config)

    def verify_kernel(self, role, config):
        self.calls["verify_kernel", role, config, self.tokens] += 1
        return self.hook("verify_kernel", role, config)

    def recheck_kernel(self, role, config):
        self.calls["recheck_kernel", role, config, self.tokens] += 1
        return self.hook("recheck_kernel", role, config)

    def time_routing(self, block_m):
        self.calls["routing"] += 1
        return measured(3.0)

    def time_combine(self):
        return measured(2.0)

    def time_layers(self, plans, rounds):
        self.calls["time_layers"] += 1
        assert rounds % 2 == 0
        return [self.hook("layer", plan, rounds, self.tokens) or self.layer(plan, rounds) for plan in plans]

    def time_rerouted(self, plans, rounds):
        self.calls["time_rerouted"] += 1
        return self.hook("rerouted", plans, rounds) or ()

    def layer(self, plan, rounds):
        return measured(4.0 + sum(self.kernel_us(role, plan.config(role)) for role in Role), samples=rounds)

    def verify_layer(self, plan):
        self.calls["verify_layer"] += 1
        return self.hook("verify_layer", plan)

    def prepare_counters(self):
        self.calls["prepare_counters"] += 1

    def counters(self, plans, limit_s=None):
        self.calls["counters"] += 1
        found = self.hook("counters", plans)
        return found if found is not None else dict.fromkeys(plans, Failed(FailureKind.RESOURCES, "no counters here"))

    def close(self):
        self.calls["close"] += 1


class VirtualH200(FakeBackend):
    """An H200 with 15 compile processes whose every answer moves a clock, as the time stamps of a real sweep do.

    Figures of a cold sweep of qwen3-30b-a3b, 2026-12-01; what grows with the weights is of older sweeps of 2.8 and 22.5 GB.
    A kernel takes between 1.05 and 2.9 times its bound.
    """

    COMPILED_PER_S, PROCESSES = 12.5, 15
    COMPILERS_READY_S = 3.7  # they import, and compile the small kernels
    READY_S, FIRST_OPEN_S = 3.9, 0.35  # processes, CUDA and ceilings; libraries
    FIRST_OF_KIND_S, LOAD_S, TRIAL_S, FLUSH_S = 0.87, 2e-3, 0.8e-3, 0.09e-3
    HOST_S = 0.07  # of a count: search, plans, the write of the table
    SMALL_KERNEL_S, GRAPH_S = 2e-3, 1e-3
    slower = 1.0

    def __init__(self, shape, **hooks):
        super().__init__(shape, **hooks)
        self.now_s, self.loaded, self.spent = 0.0, set(), Counter()
        self.verified, self.referenced, self.captured = set(), set(), set()
        self.processes, self.queue = [self.COMPILERS_READY_S] * self.PROCESSES, {}

    def clock(self):
        return self.now_s

    def take(self, seconds, what):
        seconds *= self.slower
        self.now_s += seconds
        self.spent[what] += seconds

    @property
    def rows(self):
        return self.tokens * self.shape.top_k

    @property
    def flops(self):
        return 6.0 * self.rows * self.shape.hidden * self.shape.inter

    @property
    def touched_bytes(self):
        return min(self.shape.local_experts, self.rows) * self.shape.expert_bytes

    @property
    def reference_s(self):
        return self.flops / 3e13 + self.touched_bytes / 1.5e11

    def kernel_us(self, role, config):
        bound_us = 1e6 * max(self.flops / 7.8e14, self.touched_bytes / 4.2e12) * (2 if role is Role.GATE_UP else 1) / 3
        tile = (
            config.block_m,
            config.block_n,
            config.block_k,
            config.num_warps,
            config.prefetch_distance,
            config.group_m,
        )
        luck = (crc32(f"{role} {self.tokens // 512} {config.structure} {tile}".encode()) % 997) / 997
        return 4.0 + bound_us * (1.05 + 1.9 * luck**2)

    def ceilings(self):
        if not self.now_s:
            self.take(self.READY_S, "start")
        return super().ceilings()

    def submit(self, kernels):
        """The pool begins a kernel whenever one of its processes is free; each takes one to two seconds."""
        for kernel in kernels:
            free_s = max(min(self.processes), self.now_s)
            self.processes[self.processes.index(min(self.processes))] = free_s + self.PROCESSES / self.COMPILED_PER_S
            self.queue[kernel] = free_s, free_s + self.slower * self.PROCESSES / self.COMPILED_PER_S

    def ended(self, wait_s=0.0):
        first_s = min((end_s for _, end_s in self.queue.values()), default=0.0)
        if first_s > self.now_s:
            self.spent["compile"] += min(wait_s, first_s - self.now_s)
            self.now_s += min(wait_s, first_s - self.now_s)
        done = [kernel for kernel, (_, end_s) in self.queue.items() if end_s <= self.now_s]
        for kernel in done:
            del self.queue[kernel]
        return [(kernel, self.compiler_says(*kernel)) for kernel in done]

    def withdraw(self):
        waiting = [kernel for kernel, (start_s, _) in self.queue.items() if start_s > self.now_s]
        for kernel in waiting:
            del self.queue[kernel]
        begun = sorted(end_s for _, end_s in self.queue.values())
        self.processes = [*begun, *[self.now_s] * (self.PROCESSES - len(begun))]
        return waiting

    def open(self, tokens):
        self.take(
            self.HOST_S
            if self.opened
            else self.FIRST_OPEN_S + 0.15e-9 * self.shape.local_experts * self.shape.expert_bytes,
            "open",
        )
        failed = super().open(tokens)
        self.take(self.reference_s, "open")
        return failed

    def launches(self, kernel_us, count, what):
        self.take(self.TRIAL_S + count * (1e-6 * kernel_us + self.FLUSH_S), what)

    def first_launch_us(self, role, config):
        if (role, config) not in self.loaded:
            kinds = {(one, loaded.structure) for one, loaded in self.loaded}
            self.take(self.LOAD_S if (role, config.structure) in kinds else self.FIRST_OF_KIND_S, "load")
            self.loaded.add((role, config))
        self.launches(self.kernel_us(role, config), 1, "race")
        first_us = super().first_launch_us(role, config)
        return first_us if isinstance(first_us, Failed) else first_us / 1.3

    def time_kernel(self, role, config, samples):
        self.launches(self.kernel_us(role, config), samples + 1, "race")
        return super().time_kernel(role, config, samples)

    def check_s(self, role):
        return 6e-4 + 1.1e-11 * self.rows * (self.shape.inter if role is Role.GATE_UP else self.shape.hidden)

    def verify_kernel(self, role, config):
        seeds = 2 if self.rows <= 1024 else 1
        self.take(seeds * (self.check_s(role) + 1e-6 * self.kernel_us(role, config)), "verify")
        if (role, config) not in self.verified:
            self.verified.add((role, config))
            share = 2 / 3 if role is Role.GATE_UP else 1 / 3
            self.take(4e-3 + share * self.shape.local_experts * self.shape.expert_bytes / 4.2e12, "verify")
        return super().verify_kernel(role, config)

    def recheck_kernel(self, role, config):
        kernel_us = self.kernel_us(role, config)
        self.take(self.check_s(role) + (1.3e-3 + 9e-6 * kernel_us if kernel_us <= 1000.0 else 0.0), "verify")
        return super().recheck_kernel(role, config)

    def time_routing(self, block_m):
        self.take(self.SMALL_KERNEL_S, "small")
        return super().time_routing(block_m)

    def time_combine(self):
        self.take(self.SMALL_KERNEL_S, "small")
        return super().time_combine()

    def time_rerouted(self, plans, rounds):
        if self.rows >= 8 * self.shape.local_experts:
            return ()
        return [self.time_layers(plans, rounds) for _ in range(6)]

    def time_layers(self, plans, rounds):
        for plan in plans:
            layer_us = 12.0 + sum(self.kernel_us(role, plan.config(role)) for role in Role)
            if (self.tokens, plan) not in self.captured:
                self.captured.add((self.tokens, plan))
                self.take(self.GRAPH_S + 2e-6 * layer_us, "finals")
            self.take(rounds * (1e-6 * layer_us + self.FLUSH_S), "finals")
        return super().time_layers(plans, rounds)

    def verify_layer(self, plan):
        if self.tokens not in self.referenced:
            self.referenced.add(self.tokens)
            self.take(self.reference_s * (2 if self.rows <= 1024 else 1), "verify")
        layer_us = 12.0 + sum(self.kernel_us(role, plan.config(role)) for role in Role)
        self.take(2e-3 + 2e-6 * layer_us, "verify")
        return super().verify_layer(plan)

    def counters(self, plans, limit_s=None):
        needed_s = 2.7 + 0.1 * len(plans) + 1.1e-9 * self.shape.local_experts * self.shape.expert_bytes
        limit_s /= self.slower  # of this machine's time, which no machine goes beyond
        self.take(min(needed_s, limit_s), "counters")
        if needed_s > limit_s:
            return dict.fromkeys(plans, Failed(FailureKind.TIMEOUT, "ncu did not end in time"))
        return super().counters(plans, limit_s)


@pytest.fixture
def fake_backend():
    return FakeBackend


@pytest.fixture
def virtual_h200():
    return VirtualH200
