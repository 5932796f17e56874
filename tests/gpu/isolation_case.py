"""A live sweep of a small layer among harmful candidates; prints what became of whom. Run as a script: CUDA stays off."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

from faulty_trials import FaultySettings

from moetune.engine.budget import Budget
from moetune.engine.session import Job, Ports, Session
from moetune.measure.isolated import IsolatedBackend
from moetune.measure.kernel_compiles import KernelCompiles
from moetune.outcome import Failed
from moetune.space.space import candidates
from moetune.strategies import Exhaustive
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=1024, inter=512, local_experts=8, top_k=2)
TOKENS = (4, 256)
KERNELS = 60
FAULTS = ("illegal", "endless", "memory")


class Journal:
    """Keeps the trials."""

    def __init__(self):
        self.trials = []

    def record(self, trial):
        self.trials.append(trial)

    def record_bound(self, tokens, bound_us):
        pass

    def record_ceilings(self, bytes_per_s, flops):
        pass


def harmful_kernels(backend) -> dict[str, MoEKernelConfig]:
    """Return a down config of the space per fault: none of a default plan, and small enough to spill nothing, so raced."""
    defaults = {heuristic_plan(SHAPE, tokens, backend.device).down for tokens in TOKENS}
    space = candidates(SHAPE, backend.device, Role.DOWN, TOKENS, limit=KERNELS // len(Role))
    small = [config for config in space.configs if config.block_n <= 64 and config.num_warps >= 4]
    return dict(zip(FAULTS, [config for config in small if config not in defaults], strict=False))


def sweep(backend, folder) -> dict:
    """Sweep, and say which choices failed at which counts and how."""
    journal = Journal()
    ports = Ports(
        journal=journal,
        known={},
        strategy=lambda terrain, seed: Exhaustive(replace(terrain, reserve=()), seed),  # every candidate has its turn
        default_plan=lambda tokens: heuristic_plan(SHAPE, tokens, backend.device),
        write_table=lambda entries, _: folder / "table.json",
        emit=lambda event: None,
    )
    job = Job(tokens=TOKENS, budget=Budget(None), kernels=KERNELS, polish=0)
    result = Session(backend, job, ports).run()
    failed = [(t.choice, t.tokens, t.outcome) for t in journal.trials if isinstance(t.outcome, Failed)]
    return {
        "counts": list(result.entries),
        "measured": sum(not isinstance(trial.outcome, Failed) for trial in journal.trials),
        "failed": {
            fault: [(tokens, end.kind.value, end.reason) for choice, tokens, end in failed if choice == config]
            for fault, config in harmful_kernels(backend).items()
        },
        "others": [
            (repr(choice), end.reason)
            for choice, _, end in failed
            if choice not in harmful_kernels(backend).values() and end.kind.value in ("launch", "timeout")
        ],
    }


def layers(backend) -> list[list]:
    """Time a harmful plan between two harmless ones, twice, and return how each time ended."""
    assert backend.open(64) is None
    good, bad, other = layer_plans(backend)
    found = [backend.time_layers([good, bad, other], 6) for _ in range(2)]
    return [[end.reason if isinstance(end, Failed) else end.samples for end in row] for row in found]


def layer_plans(backend) -> tuple[LayerPlan, LayerPlan, LayerPlan]:
    """Return three plans of the same block_m."""
    default = heuristic_plan(SHAPE, 64, backend.device)
    gate_up = replace(default.gate_up, group_m=default.gate_up.group_m + 1)
    down = replace(default.down, group_m=default.down.group_m + 1)
    return default, replace(default, gate_up=gate_up), replace(default, down=down)


def main() -> None:
    """Run both, and print JSON."""
    folder = Path(sys.argv[1])
    settings = FaultySettings(shape=SHAPE, faults=folder / "faults.pickle")
    backend = IsolatedBackend(settings, KernelCompiles(SHAPE), factory="faulty_trials:open_faulty")
    try:
        kernels = {(Role.DOWN, config): fault for fault, config in harmful_kernels(backend).items()}
        settings.faults.write_bytes(pickle.dumps(kernels | {layer_plans(backend)[1]: "illegal"}))
        found = sweep(backend, folder) | {"layers": layers(backend)}
    finally:
        backend.close()
    import torch

    print(json.dumps(found | {"cuda_here": torch.cuda.is_initialized()}))


if __name__ == "__main__":
    main()
