"""Whole sweeps on a fake GPU: routings that are never mixed, noise that decides, clocks that are told of or refused."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest

from moetune import tuning
from moetune.engine import events
from moetune.engine.budget import Budget
from moetune.errors import MissingError, RunError, UsageError
from moetune.measure.card import CardState
from moetune.measure.clocks import ClockReading, OtherProcess
from moetune.measure.gpu_name import Gpu
from moetune.models.routing import UNIFORM, Hot, Zipf, parse_routing
from moetune.outcome import ClockSpan, Measured, Stage, over_all, summarize
from moetune.store import Provenance, Store, load_recording
from moetune.tuning import Bed, SweepRequest, replay_bed, run_on
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.shape import MoEShape
from moetune_kernels.table import TunedTable

TOKENS = (1, 8, 64, 512, 4096)
SHAPE = MoEShape(hidden=1024, inter=512, local_experts=8, top_k=2)


def bed_of(backend, folder):
    made_for = Provenance(
        backend=backend.name,
        shape=backend.shape,
        device=backend.device,
        kernels_sha256="0" * 64,
        triton="3.6.0",
        torch="2.11.0",
        driver="580.1",
    )
    return Bed(backend, made_for, "2026-12-01T08:00:00+00:00", folder / "tables", folder / "trials.sqlite")


def sweep_on(backend, folder, on_event=lambda _: None, **changes):
    request = replace(SweepRequest(shape=SHAPE, tokens=TOKENS, budget_s=30.0), **changes)
    return run_on(bed_of(backend, folder), request, Budget(None), on_event)


def plans_of(table):
    return {tokens: entry.plan for tokens, entry in table.entries.items()}


def without_smem(plan):
    return replace(plan, gate_up=replace(plan.gate_up, smem_size=None), down=replace(plan.down, smem_size=None))


def sweep_routed(fake_backend, folder, routing, **changes):
    """A sweep under another routing, as the GPU's bed would hold it."""
    backend = fake_backend()
    bed = bed_of(backend, folder)
    bed = replace(bed, provenance=replace(bed.provenance, routing=routing.text))
    request = replace(SweepRequest(shape=SHAPE, tokens=TOKENS, routing=routing), **changes)
    seen = []
    return run_on(bed, request, Budget(None), seen.append), backend, seen


def test_a_sweep_under_another_routing_shares_no_trial_and_keeps_no_entry(fake_backend, tmp_path):
    sweep_on(fake_backend(), tmp_path)
    result, backend, seen = sweep_routed(fake_backend, tmp_path, Zipf(), tokens=(8, 64))
    assert seen[0].resumed == 0
    assert seen[0].routing == "zipf:1.1"
    assert backend.calls["first_launch", 8] > 0 < backend.calls["first_launch", 64]
    assert (tuple(result.table.entries), result.kept) == ((8, 64), ())
    table = TunedTable.parse(result.table_path.read_bytes(), "the table")
    assert table.routing == "zipf:1.1"
    again, _, seen = sweep_routed(fake_backend, tmp_path, Zipf(), tokens=(16,))
    assert tuple(again.table.entries) == (8, 16, 64)  # of one routing are kept as ever
    back, uniform = [], fake_backend()
    assert tuple(sweep_on(uniform, tmp_path, back.append, tokens=(1,)).table.entries) == (1,)
    assert back[0].resumed > 0


def test_a_recording_carries_its_routing_and_replays_under_no_other(fake_backend, tmp_path):
    live, _, _ = sweep_routed(fake_backend, tmp_path, Hot(0.7), record=tmp_path / "hot.jsonl.xz")
    recorded = load_recording(tmp_path / "hot.jsonl.xz")
    assert recorded.provenance.routing == "hot:0.7"
    request = SweepRequest(shape=SHAPE, tokens=TOKENS, out_dir=tmp_path / "replay", routing=Hot(0.7))
    table = run_on(replay_bed(recorded, request), request, Budget(None), lambda _: None).table
    assert (table.routing, plans_of(table)) == ("hot:0.7", plans_of(live.table))
    with pytest.raises(MissingError, match=r"trials of hot:0\.7 routing, asked was uniform"):
        replay_bed(recorded, replace(request, routing=UNIFORM))


def test_a_trace_of_another_layer_is_refused_before_anything_runs(tmp_path):
    np.savez(tmp_path / "t.npz", topk_ids=np.array([[0, 9]]))
    with pytest.raises(UsageError, match="names expert 9, the layer has 8"):
        tuning.sweep(SweepRequest(shape=SHAPE, tokens=TOKENS, routing=parse_routing(str(tmp_path / "t.npz"))))


def in_rounds(fake_backend, **hooks):
    """A GPU whose layers are timed in rounds, with noise of a percent."""
    from random import Random

    class InRounds(fake_backend):
        draw = Random(5)

        def layer(self, plan, rounds):
            true_us = super().layer(plan, rounds).median_us
            times_us = tuple(round(true_us * self.draw.gauss(1.0, 0.01), 3) for _ in range(rounds))
            sample = summarize(times_us)
            return replace(
                super().layer(plan, rounds),
                median_us=sample.median_us,
                spread_us=sample.spread_us,
                samples=sample.count,
                times_us=times_us,
            )

    return InRounds(**hooks)


def test_a_replay_decides_by_the_recorded_rounds_and_never_counts_them_twice(fake_backend, tmp_path):
    live = sweep_on(in_rounds(fake_backend), tmp_path, record=tmp_path / "rounds.jsonl.xz")
    recorded = load_recording(tmp_path / "rounds.jsonl.xz")
    finals = [trial for trial in recorded.trials if trial.stage is Stage.FINAL and isinstance(trial.outcome, Measured)]
    assert all(len(trial.outcome.times_us) == trial.outcome.samples for trial in finals)
    assert len({trial.outcome.samples for trial in finals}) > 2  # some were clear sooner than others
    request = SweepRequest(shape=SHAPE, tokens=TOKENS, out_dir=tmp_path / "replay")
    replayed = run_on(replay_bed(recorded, request), request, Budget(None), lambda _: None)
    assert plans_of(replayed.table) == plans_of(live.table)
    for tokens, entry in live.table.entries.items():
        again = replayed.table.entries[tokens]
        assert (again.median_us, again.spread_us, again.baseline_us) == (
            entry.median_us,
            entry.spread_us,
            entry.baseline_us,
        )


def test_the_noise_that_was_asked_for_decides_what_is_adopted(fake_backend, tmp_path):
    """No config is more than 20% faster than another, so under a noise of 20% every default plan stays."""

    def kernel_us(role, config, tokens):
        return 500.0 * (1.0 - 0.18 * (crc32(f"{role} {tokens} {config}".encode()) % 997) / 997)

    few, many = (
        sweep_on(in_rounds(fake_backend, kernel_us=kernel_us), tmp_path / str(noise), noise=noise).table
        for noise in (0.2, 0.005)
    )
    device = fake_backend().device

    def adopted(table):
        return {
            tokens
            for tokens, entry in table.entries.items()
            if without_smem(entry.plan) != without_smem(heuristic_plan(SHAPE, tokens, device))
        }

    assert adopted(few) == set()
    assert len(adopted(many)) >= 4


@pytest.mark.parametrize("noise", [-0.001, 0.21, float("nan"), float("inf")])
def test_a_noise_that_makes_no_sense_is_refused(noise):
    with pytest.raises(UsageError, match=r"noise must be from 0 to 0\.2"):
        tuning.sweep(SweepRequest(shape=SHAPE, tokens=TOKENS, noise=noise))


def throttled(fake_backend, reasons):
    """A GPU whose finals are timed under other ``reasons`` at each token count."""

    class Throttled(fake_backend):
        seen = ()

        def layer(self, plan, rounds):
            span = ClockSpan(sm_mhz=(1200, 1980), sm_max_mhz=1980, throttle=reasons.get(self.tokens, ()))
            self.seen = (*self.seen, span)
            return replace(super().layer(plan, rounds), clocks=span)

        def clocks(self):
            return over_all(self.seen)

    return Throttled()


def test_a_gpu_that_ran_slowly_is_told_of(fake_backend, tmp_path):
    seen = []
    result = sweep_on(throttled(fake_backend, {8: ("power cap",)}), tmp_path, seen.append, tokens=(1, 8))
    warned = [event.text for event in seen if isinstance(event, events.Warned)]
    assert any("fell to 1200 MHz of 1980 MHz (power cap)" in text for text in warned)
    assert result.clocks.sm_mhz == (1200, 1980)
    assert result.held_down == {"power cap": (8,)}
    with Store(result.store_path) as store:
        finals = [row.trial for row in store.rows(SHAPE) if row.trial.stage is Stage.FINAL]
        assert {trial.outcome.clocks.throttle for trial in finals if trial.tokens == 8} == {("power cap",)}


def test_a_strict_sweep_writes_no_entry_of_a_hot_gpu_and_keeps_the_one_that_was_there(fake_backend, tmp_path):
    before = sweep_on(fake_backend(), tmp_path, tokens=(1, 8, 64)).table
    seen, reasons = [], {8: ("power cap", "hardware thermal slowdown"), 64: ("power cap",)}
    result = sweep_on(throttled(fake_backend, reasons), tmp_path, seen.append, tokens=(1, 8, 16, 64), strict=True)
    refused = [event for event in seen if isinstance(event, events.TokenRefused)]
    assert {event.tokens for event in refused} == {8}
    assert "held down while it was timed (hardware thermal slowdown)" in refused[0].reason
    assert tuple(result.table.entries) == (1, 8, 16, 64)  # a power cap alone is the normal state of a large card
    assert result.kept == (8,)
    assert result.table.entries[8].median_us == before.entries[8].median_us
    loose = sweep_on(throttled(fake_backend, reasons), tmp_path, tokens=(1, 8), fresh=True)
    assert loose.kept == (16, 64)


def test_a_strict_sweep_of_nothing_but_a_hot_gpu_fails_with_the_reason(fake_backend, tmp_path):
    backend = throttled(fake_backend, {8: ("software thermal slowdown",)})
    with pytest.raises(RunError, match=r"software thermal slowdown\); cool the GPU, or leave --strict away"):
        sweep_on(backend, tmp_path, tokens=(8,), strict=True)
    assert not list((tmp_path / "tables").rglob("*.json"))


@pytest.fixture
def shared_gpu(monkeypatch, fake_backend, tmp_path):
    """A fake GPU that another process computes on."""
    backend = fake_backend()
    reading = ClockReading(throttle_bits=1)
    backend.card = lambda: CardState(reading=reading, others=(OtherProcess(4242, 1 << 30),), busy_percent=0)
    monkeypatch.setattr(tuning, "_gpu_is_there", lambda: True)
    monkeypatch.setattr(tuning, "gpu_of", lambda index: Gpu(name="NVIDIA H200", index=index, uuid="GPU-1"))
    monkeypatch.setattr(tuning, "lock_dirs", lambda: [tmp_path / "locks"])
    monkeypatch.setattr(tuning, "_gpu_backend", lambda request, ahead: backend)
    monkeypatch.setattr(tuning, "_gpu_bed", lambda backend, request: bed_of(backend, tmp_path))
    return backend


def test_a_shared_gpu_is_told_of_and_a_strict_sweep_does_not_start_on_it(shared_gpu, tmp_path):
    seen, request = [], SweepRequest(shape=SHAPE, tokens=(1,))
    tuning.sweep(request, seen.append)
    assert isinstance(seen[0], events.Warned)
    assert "shared with process 4242 with 1.0 GiB" in seen[0].text
    closed = shared_gpu.calls["close"]
    assert closed
    table = next((tmp_path / "tables").rglob("*.json"))
    table.unlink()
    with pytest.raises(MissingError, match="--strict: this GPU is shared with process 4242"):
        tuning.sweep(replace(request, strict=True))
    assert not table.exists()
    assert shared_gpu.calls["close"] > closed
