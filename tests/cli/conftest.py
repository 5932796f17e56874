"""A small made-up recording, so that the whole command runs here: search, store, table, screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetune.outcome import Compiled, Figure, Measured, Source, Stage, Subject, Trial
from moetune.store import shipped_shapes
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=512, inter=256, local_experts=8, top_k=2)
TOKENS = (1, 16, 256)
SHIPPED = shipped_shapes()  # before a test hides them
COMPILED = Compiled(registers=64, spills=0, smem_bytes=32_768, block_size=128)


def measured(median_us):
    known = Figure(16.0, Source.ANALYTICAL)
    return Measured(
        median_us=median_us,
        spread_us=0.05,
        samples=25,
        flops_per_byte=known,
        bandwidth_gbps=Figure(1000.0, Source.ANALYTICAL),
        issue_efficiency=Figure.unavailable("made up"),
    )


def config(block_m, block_n):
    return MoEKernelConfig(structure=Structure.GATHER, block_m=block_m, block_n=block_n, block_k=64)


def trials(shape, tokens):
    """Yield every kernel of two tile widths and of the default plan; the wide tile is the fastest."""
    default = heuristic_plan(shape, tokens, TARGETS["sm_90"])
    for subject, slow in ((Subject.GATE_UP, default.gate_up), (Subject.DOWN, default.down)):
        times = {slow: 20.0, config(slow.block_m, 64): 12.0, config(slow.block_m, 32): 14.0}
        for choice, median_us in times.items():
            for stage in Stage:
                yield Trial(
                    subject=subject,
                    tokens=tokens,
                    choice=choice,
                    stage=stage,
                    outcome=measured(median_us),
                    compiled=COMPILED,
                    verified=True,
                )
    yield Trial(
        subject=Subject.ROUTING,
        tokens=tokens,
        choice=default.block_m,
        stage=Stage.SCREEN,
        outcome=measured(3.0),
    )
    yield Trial(subject=Subject.COMBINE, tokens=tokens, choice=0, stage=Stage.SCREEN, outcome=measured(2.0))


def ship(folder, shape):
    """Save a made-up recording of ``shape`` under the name that shipped ones have."""
    from moetune.store import Provenance, Recording, save_recording

    made_up = Recording(
        provenance=Provenance(
            backend="cuda",
            shape=shape,
            device=TARGETS["sm_90"],
            kernels_sha256="0" * 64,
            triton="3.6.0",
            torch="2.13.0",
            driver="580.00",
        ),
        ceilings={"bytes_per_s": 4.2e12, "flops": 7.8e14},
        bounds=dict.fromkeys(TOKENS, 8.0),
        measured_at="2026-01-01T00:00:00+00:00",
        command="moetune sweep",
        trials=tuple(trial for tokens in TOKENS for trial in trials(shape, tokens)),
    )
    save_recording(made_up, folder / f"{shape.key}.jsonl.xz")


@pytest.fixture
def no_gpu(tmp_path, monkeypatch):
    """Hide any GPU, ship no recordings, and work in an empty folder; return the folder of recordings."""
    from moetune.store import recording

    monkeypatch.setattr("moetune.tuning._gpu_is_there", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(recording, "SHIPPED_DIRECTORY", tmp_path / "recordings")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "recordings"


@pytest.fixture
def recorded(no_gpu):
    """Ship a made-up recording of one small shape; return the shape's flags."""
    ship(no_gpu, SHAPE)
    return ["--hidden", "512", "--inter", "256", "--experts", "8", "--top-k", "2"]


@pytest.fixture
def documented(no_gpu):
    """Ship made-up recordings of the layers whose real ones ship: a document may replay no other."""
    for shape in (
        MoEShape(hidden=4096, inter=14336, local_experts=64, top_k=2),
        MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2),
        MoEShape(hidden=2048, inter=768, local_experts=128, top_k=8),
    ):
        if shape.key in SHIPPED:
            ship(no_gpu, shape)
            ship(Path("moetune/recordings"), shape)  # where a checkout has them, for commands that take a file


@pytest.fixture
def quick_compiler(monkeypatch):
    """Replace the compiler, which tests/offline runs for real."""

    def compile_all(shape, device, choices, **_):
        return ((choice, COMPILED) for choice in choices)

    monkeypatch.setattr("moetune.measure.offline.compile_offline", compile_all)
