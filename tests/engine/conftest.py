"""A GPU that is not there: deterministic times, and failures on demand."""

from __future__ import annotations

from collections import Counter
from zlib import crc32

import pytest

from moetune.engine.backend import Ceilings
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


class FakeBackend:
    """Times follow the space's own guess with a bump of up to 20% per config; hooks make single trials fail."""

    name = "cuda"

    def __init__(self, shape=SHAPE, device=DEVICE, **hooks):
        self.shape, self.device, self.hooks = shape, device, hooks
        self.calls = Counter()
        self.journal = MemoryJournal()  # where a test that needs no store keeps this GPU's trials
        self.tokens = 0
        self.opened = []

    def hook(self, name, *args):
        return self.hooks[name](*args) if name in self.hooks else None

    def kernel_us(self, role, config):
        planted = self.hook("kernel_us", role, config, self.tokens)
        if planted is not None:
            return planted
        guess = predict(config, Problem(self.shape, self.device, role), self.tokens) / 1e6
        return guess * (1.0 + 0.2 * (crc32(f"{role.value} {self.tokens} {choice_text(config)}".encode()) % 997) / 997)

    def ceilings(self):
        return Ceilings(bytes_per_s=4.2e12, flops=8.0e14)

    def recorded_plans(self, tokens):
        return ()

    def recorded(self, role):
        return None

    def compile(self, role, configs):
        for config in configs:
            self.calls["compile"] += 1
            yield (
                config,
                self.hook("compile", role, config)
                or Compiled(registers=128, spills=0, smem_bytes=4096, block_size=config.block_size),
            )

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
        return self.hook("first_launch", role, config) or 1.3 * self.kernel_us(role, config)

    def verify_kernel(self, role, config):
        self.calls["verify_kernel", role, config, self.tokens] += 1
        return self.hook("verify_kernel", role, config)

    def time_routing(self, block_m):
        self.calls["routing"] += 1
        return measured(3.0)

    def time_combine(self):
        return measured(2.0)

    def time_layers(self, plans, rounds):
        self.calls["time_layers"] += 1
        assert rounds % 2 == 0
        return [self.hook("layer", plan, rounds, self.tokens) or self.layer(plan, rounds) for plan in plans]

    def layer(self, plan, rounds):
        return measured(4.0 + sum(self.kernel_us(role, plan.config(role)) for role in Role), samples=rounds)

    def verify_layer(self, plan):
        self.calls["verify_layer"] += 1
        return self.hook("verify_layer", plan)

    def counters(self, plans, limit_s=None):
        self.calls["counters"] += 1
        found = self.hook("counters", plans)
        return found if found is not None else dict.fromkeys(plans, Failed(FailureKind.RESOURCES, "no counters here"))

    def close(self):
        self.calls["close"] += 1


@pytest.fixture
def fake_backend():
    return FakeBackend
