"""A GPU that is not there, in a process of its own, that does to it whatever a test plants; and a diary of what it did."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from moetune.engine.backend import Ceilings, EntryTerms, KernelByKernel
from moetune.errors import MissingError
from moetune.measure.card import CardState
from moetune.measure.clocks import ClockReading, OtherProcess
from moetune.measure.gpu_messages import GpuSettings
from moetune.measure.gpu_respawn import HeadStart
from moetune.measure.isolated import IsolatedBackend
from moetune.outcome import ClockSpan, Compiled, Failed, FailureKind, Figure, Measured, Source
from moetune.store.codec import choice_text
from moetune_kernels.config import Role
from moetune_kernels.device import TARGETS
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=1024, inter=512, local_experts=8, top_k=2)
DEVICE = TARGETS["sm_90"]
NONE = Figure.unavailable("a planted GPU counts nothing")
ALWAYS = 1 << 30
LIMIT_S = 60.0
DIARY = "diary.jsonl"
DIARY_LOCK = "diary.lock"
STICKY = "CUDA error: an illegal memory access was encountered"


@dataclass(frozen=True, kw_only=True)
class Deed:
    """Something that happens when ``method`` is asked about ``target`` (an argument, or a plan among them) on ``device``.

    It happens ``times`` times in all processes together, after ``spared`` such questions went well.
    """

    what: str
    method: str
    target: Any = None
    times: int = ALWAYS
    spared: int = 0
    device: int | None = None

    def is_about(self, method, arguments):
        flat = [item for one in arguments for item in (one if isinstance(one, (list, tuple)) else [one])]
        return self.method == method and (self.target is None or self.target in flat)


@dataclass(frozen=True, kw_only=True)
class Planted(GpuSettings):
    """The settings of a planted GPU."""

    folder: Path
    deeds: tuple[Deed, ...] = ()


class SomeCompiles:
    """Compiles at once, and knows nothing of a GPU."""

    def __init__(self):
        self.closed, self.queued = 0, []

    def submit(self, kernels, device):
        assert device == DEVICE
        self.queued += kernels

    def ended(self, wait_s=0.0):
        kernels, self.queued = self.queued, []
        return [((role, config), self.report(config)) for role, config in kernels]

    def withdraw(self):
        kernels, self.queued = self.queued, []
        return kernels

    def report(self, config):
        registers = 32 + crc32(choice_text(config).encode()) % 200
        return Compiled(registers=registers, spills=0, smem_bytes=4096, block_size=config.block_size)

    def close(self):
        self.closed += 1


def limits(method, arguments, tokens):
    return LIMIT_S


class OneByOne(IsolatedBackend):
    """Asks about one kernel at a time, too."""

    def first_launch_us(self, role, config):
        terms = EntryTerms(slow_ratio=0.0, samples=0, long_samples=0, long_us=0.0)
        (entered,) = self.enter_kernels(role, [config], terms)
        return entered.outcome if entered.first_us is None else entered.first_us

    def time_kernel(self, role, config, samples):
        (outcome,) = self.time_kernels(role, [config], samples)
        return outcome

    def verify_kernel(self, role, config):
        (wrong,) = self.verify_kernels(role, [config])
        return wrong


def open_backend(folder, *deeds, factory="planted_gpu:open_planted", limits=limits, device=None, ahead=None):
    settings = Planted(shape=SHAPE, seed=7, folder=folder, deeds=deeds)
    return OneByOne(
        settings, SomeCompiles(), factory=factory, limits=limits, given=HeadStart(device=device, process=ahead)
    )


def open_planted(settings):
    gpu = PlantedGpu(settings)
    gpu.asked("start")
    return gpu


def no_gpu(settings):
    raise MissingError("no CUDA GPU in this machine; `moetune doctor` says what works without one")


def broken_import(settings):
    raise ImportError("libcuda.so.1: cannot open shared object file")


def read_diary(folder, method=None):
    path = folder / DIARY
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if method in (None, line["method"])]


def is_alive(pid):
    """Whether a process runs; one that waits to be reaped does, too."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(done, within_s=LIMIT_S):
    """Wait until ``done()`` holds."""
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(folder, within_s=30.0):
    """Return the processes of the diary that are still there after a while."""
    pids = {line["pid"] for line in read_diary(folder)} | {line["child"] for line in read_diary(folder, "child")}
    deadline = time.monotonic() + within_s
    while (left := sorted(pid for pid in pids if is_alive(pid))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def stop(backend):
    """Freeze the process that lives: it reads nothing any more."""
    os.kill(backend._gpu.pid, signal.SIGSTOP)


def measured(median_us, samples, issue=NONE):
    return Measured(
        median_us=median_us,
        spread_us=0.001 * median_us,
        samples=samples,
        flops_per_byte=NONE,
        bandwidth_gbps=NONE,
        issue_efficiency=issue,
    )


class PlantedGpu(KernelByKernel):
    """Every time follows from the choice alone, so that each process gives the same."""

    device = DEVICE

    def __init__(self, settings):
        self.settings, self.lost, self.tokens = settings, None, 0
        self.compiled, self.limits = {}, None

    def learn(self, compiled, ceilings):
        self.compiled.update(compiled)
        self.limits = ceilings or self.limits

    # what it is asked

    def asked(self, method, *arguments):
        """Write the question down, then do what was planted for it; returns a failure that is planted."""
        device = self.settings.device_index
        here = [deed for deed in self.settings.deeds if deed.device in (None, device)]
        deed = next((deed for deed in here if deed.is_about(method, arguments)), None)
        before = 0
        with self.alone():  # two processes that count and write at once would both be the first
            if deed is not None:
                before = sum(line.get("deed") == self.settings.deeds.index(deed) for line in read_diary(self.folder))
            self.write(
                method=method,
                device=device,
                tokens=self.tokens,
                seed=self.settings.seed,
                about=[len(one) if isinstance(one, (list, tuple)) else str(one) for one in arguments],
                known=len(self.compiled),
                deed=None if deed is None else self.settings.deeds.index(deed),
            )
        if deed is None or not deed.spared <= before < deed.spared + deed.times:
            return None
        return getattr(self, f"do_{deed.what}")()

    @property
    def folder(self):
        return self.settings.folder

    @contextmanager
    def alone(self):
        """Have the diary to oneself."""
        with (self.folder / DIARY_LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def write(self, **line):
        with (self.folder / DIARY).open("a") as diary:
            diary.write(json.dumps({"pid": os.getpid(), **line}) + "\n")

    def ceilings(self):
        self.asked("ceilings")
        return Ceilings(bytes_per_s=4.2e12, flops=8.0e14)

    def open(self, tokens):
        failed = self.asked("open", tokens)
        self.tokens = 0 if failed else tokens
        return failed

    def bound_us(self):
        self.asked("bound_us")
        assert self.limits is not None
        return 1.0 + self.tokens / 100

    def first_launch_us(self, role, config):
        return self.asked("first_launch_us", role, config) or 1.3 * self.kernel_us(role, config)

    def time_kernel(self, role, config, samples):
        failed = self.asked("time_kernel", role, config, samples)
        compiled = self.compiled.get((role, config))
        issue = Figure(compiled.registers / 256, Source.STATIC) if compiled else NONE
        return failed or measured(self.kernel_us(role, config), samples, issue)

    def verify_kernel(self, role, config):
        return self.asked("verify_kernel", role, config)

    def recheck_kernel(self, role, config):
        return self.asked("recheck_kernel", role, config)

    def time_routing(self, block_m):
        return self.asked("time_routing", block_m) or measured(3.0, 15)

    def time_combine(self):
        return self.asked("time_combine") or measured(2.0, 15)

    def time_layers(self, plans, rounds):
        assert rounds % 2 == 0
        failed = self.asked("time_layers", plans, rounds)
        return [failed if failed and self.is_target(plan) else measured(self.layer_us(plan), rounds) for plan in plans]

    def time_rerouted(self, plans, rounds):
        failed = self.asked("time_rerouted", plans, rounds)
        return [
            [
                failed if failed and self.is_target(plan) else measured(routing * self.layer_us(plan), rounds)
                for plan in plans
            ]
            for routing in (1, 2)
        ]

    def verify_layer(self, plan):
        return self.asked("verify_layer", plan)

    def clocks(self):
        speed = 1000 + len(read_diary(self.folder, "start"))
        return ClockSpan(sm_mhz=(speed, speed))

    def card(self):
        return CardState(reading=ClockReading(throttle_bits=1), others=(OtherProcess(4242, None),), busy_percent=0)

    def is_target(self, plan):
        return any(deed.target == plan for deed in self.settings.deeds)

    def kernel_us(self, role, config):
        tile = config.block_m * config.block_n * config.block_k
        luck = crc32(f"{role.value} {self.tokens} {choice_text(config)}".encode()) % 997
        return 10.0 + self.tokens / 50 + 1e5 / tile + luck / 100

    def layer_us(self, plan):
        return 4.0 + sum(self.kernel_us(role, plan.config(role)) for role in Role)

    # what may be planted

    def do_refuse(self):
        return Failed(FailureKind.LAUNCH, "a launch that failed and harmed nobody")

    def do_full(self):
        return Failed(FailureKind.RESOURCES, "needs 100 GiB of GPU memory, 1 GiB are free")

    def do_sticky(self):
        self.lost = Failed(FailureKind.LAUNCH, f"RuntimeError: {STICKY}")
        return self.lost

    def do_raise(self):
        raise ZeroDivisionError("a bug in a kernel's launcher")

    def do_raise_sticky(self):
        raise RuntimeError(STICKY)

    def do_wait(self):
        time.sleep(0.3)

    def do_sleep(self):
        time.sleep(3600)

    def do_abort(self):
        sys.stderr.write("terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: lost\n")
        sys.stderr.flush()
        os.abort()

    def do_abort_in_company(self):
        if read_diary(self.folder)[-1]["about"][0] > 1:
            os.abort()

    def do_abort_in_many_rounds(self):
        if int(read_diary(self.folder)[-1]["about"][1]) > 2:
            os.abort()

    def do_kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def do_exit(self):
        os._exit(137)

    def do_leave(self):
        os._exit(0)

    def do_print(self):
        for stream in (1, 2):
            os.write(stream, b"\x00\xff garbage \n" * 10_000)
        print("more of it", flush=True)

    def do_scribble(self):
        os.write(int(sys.argv[2]), b"Segmentation fault in a library that prints where it wants\n")
        time.sleep(3600)

    def do_torn(self):
        os.write(int(sys.argv[2]), (1000).to_bytes(8, "little") + b"half")
        os._exit(0)

    def do_half(self):
        os.write(int(sys.argv[2]), (1000).to_bytes(8, "little") + b"half")
        time.sleep(3600)

    def do_hang_up(self):
        os.close(int(sys.argv[2]))
        time.sleep(3600)

    def do_unpicklable(self):
        return lambda: None

    def do_child(self):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        self.write(method="child", child=child.pid)
        os.abort()


def sleeping_sweep(code, folder, sleeps):
    """Run the sweep of ``code`` in a process of its own, and return it once ``sleeps`` says that its GPUs do."""
    tests = Path(__file__).parents[1]
    paths = [str(tests / "engine"), str(tests / "measure"), *(entry for entry in sys.path if entry)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60.0
    while not sleeps():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process
