"""What the screen says of a sweep, fed with made-up events."""

from __future__ import annotations

import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from moetune.cli.sweep_display import PlainLines, live_view, row_text, sweep_display
from moetune.cli.sweep_progress import SweepProgress, status_line
from moetune.engine.events import (
    CompileProgress,
    CountersStarted,
    GpuAwaited,
    SpaceCompiled,
    SpaceReady,
    SurveyStarted,
    SweepStarted,
    TokenDone,
    TokenFailed,
    TokenRefused,
    TokenStarted,
    TrialEnded,
    Warned,
)
from moetune.outcome import Failed, FailureKind, Figure, Measured, Stage, Subject, Trial
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape
from moetune_kernels.table import Entry

CONFIG = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
WIDE = MoEKernelConfig(structure=Structure.TMA_PERMUTE, block_m=128, block_n=256, block_k=64)
SHAPE = MoEShape(hidden=64, inter=64, local_experts=8, top_k=2)
NONE = {"value": None, "source": "unavailable", "reason": "made up"}


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def trial(subject, time_us, tokens=16, failure=None):
    gap = Figure.unavailable("made up")
    outcome = failure or Measured(
        median_us=time_us, spread_us=0.1, samples=3, flops_per_byte=gap, bandwidth_gbps=gap, issue_efficiency=gap
    )
    return TrialEnded(Trial(subject=subject, tokens=tokens, choice=CONFIG, stage=Stage.SCREEN, outcome=outcome))


def entry(tokens=16, median_us=10.0, baseline_us=12.0):
    return Entry(
        tokens=tokens,
        serves=(tokens, tokens),
        plan=LayerPlan(gate_up=CONFIG, down=CONFIG),
        median_us=median_us,
        spread_us=0.1,
        baseline_us=baseline_us,
        bound_us=9.0,
        flops_per_byte={"value": 16.0, "source": "analytical"},
        bandwidth_gbps={"value": 4120.0, "source": "counter"},
        issue_efficiency=NONE,
    )


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def progress(clock):
    shown = SweepProgress(clock=clock)
    shown.update(SweepStarted("cuda", TARGETS["sm_90"], SHAPE, (1, 16), Path("trials.sqlite"), 0))
    return shown


def test_compiling_shows_its_speed_and_the_time_left(progress, clock):
    progress.update(CompileProgress(0, 100, 0))
    clock.now_s += 10
    progress.update(CompileProgress(50, 100, 2))
    assert status_line(progress) == "compiling 50/100 · 5.0 candidates/s · ETA 0:10"


def test_measuring_has_a_speed_and_an_eta_of_its_own(progress, clock):
    progress.update(CompileProgress(100, 100, 0))
    clock.now_s += 1000
    progress.update(TokenStarted(1, 1, 2))
    for _ in range(30):
        progress.update(trial(Subject.GATE_UP, 5.0, tokens=1))
    clock.now_s += 10
    progress.update(TokenDone(entry(tokens=1)))
    progress.update(TokenStarted(16, 2, 2))
    assert status_line(progress) == "measuring 1/2 · 3.0 candidates/s · ETA 0:10"


def test_no_speed_is_told_before_a_second_has_passed(progress, clock):
    progress.update(CompileProgress(0, 278, 0))
    clock.now_s += 1e-4
    progress.update(CompileProgress(1, 278, 0))
    assert status_line(progress) == "compiling 1/278"
    clock.now_s += 1.0
    progress.update(CompileProgress(9, 278, 0))
    assert status_line(progress).startswith("compiling 9/278 · 9.0 candidates/s · ETA 0:2")


def test_the_speed_is_that_of_the_last_ten_seconds(progress, clock):
    progress.update(CompileProgress(0, 1000, 0))
    clock.now_s += 10
    progress.update(CompileProgress(500, 1000, 0))
    clock.now_s += 20
    progress.update(CompileProgress(520, 1000, 0))
    assert progress.per_second == 2.0


def test_kernels_compiled_while_measuring_do_not_change_the_phase(progress, clock):
    progress.update(CompileProgress(278, 278, 0))
    progress.update(TokenStarted(1, 1, 2))
    progress.update(trial(Subject.GATE_UP, 5.0, tokens=1))
    clock.now_s += 10
    progress.update(CompileProgress(3, 9, 0))
    assert status_line(progress) == "measuring 0/2 · compiling 3/9 · 0.1 candidates/s"
    progress.update(CompileProgress(9, 9, 0))
    assert status_line(progress) == "measuring 0/2 · 0.1 candidates/s"
    progress.update(CompileProgress(9, 20, 0))
    progress.update(TokenDone(entry(tokens=1)))
    assert status_line(progress) == "measuring 1/2 · compiling 9/20 · 0.1 candidates/s · ETA 0:10"


def test_the_time_left_is_never_negative_and_steps_never_pass_the_last(progress, clock):
    for place, tokens in ((1, 1), (2, 16)):
        progress.update(TokenStarted(tokens, place, 2))
        clock.now_s += 60
        progress.update(CompileProgress(9, 9, 0))
        progress.update(TokenDone(entry(tokens=tokens)))
        assert progress.eta_s is None or progress.eta_s >= 0
        assert progress.steps == (place, 2)
    progress.update(TokenDone(entry(tokens=16)))
    assert progress.steps == (2, 2)
    assert "ETA" not in status_line(progress)
    progress.update(CountersStarted(2))
    assert status_line(progress) == "reading counters"


def test_a_survey_is_a_phase_of_its_own_and_marks_its_row(progress):
    from rich.console import Console

    progress.update(CompileProgress(278, 278, 0))
    progress.update(SurveyStarted(16, 1, 2))
    progress.update(trial(Subject.GATE_UP, 5.0, tokens=16))
    progress.update(CompileProgress(278, 290, 0))
    sink = StringIO()
    Console(file=sink, width=80).print(live_view(progress))
    lines = sink.getvalue().splitlines()
    assert lines[0].strip() == "surveying 0/2 · compiling 278/290"
    assert [line.split()[-1] for line in lines[-2:]] == ["waiting", "measuring"]
    progress.update(TokenStarted(1, 1, 2))
    assert status_line(progress) == "measuring 0/2 · compiling 278/290"


def test_counts_that_several_gpus_measure_are_all_marked_and_none_of_them_is_done(progress):
    progress.update(TokenStarted(1, 1, 3))
    progress.update(TokenStarted(16, 2, 3))
    assert (progress.current, progress.steps) == ({1, 16}, (0, 3))
    progress.update(TokenDone(entry(tokens=16)))
    progress.update(TokenStarted(64, 3, 3))
    assert (progress.current, progress.steps) == ({1, 64}, (1, 3))
    progress.update(TokenDone(entry(tokens=1)))
    progress.update(TokenFailed(64, "no room"))
    assert (progress.current, progress.steps) == (set(), (3, 3))


def test_failures_are_counted_by_kind(progress):
    progress.update(trial(Subject.DOWN, 0, failure=Failed(FailureKind.WRONG, "row 3")))
    progress.update(trial(Subject.DOWN, 0, failure=Failed(FailureKind.SLOW, "9x")))
    progress.update(trial(Subject.DOWN, 0, failure=Failed(FailureKind.SLOW, "4x")))
    assert "dropped: 2 slow, 1 wrong" in status_line(progress)
    progress.update(trial(Subject.DOWN, 0, failure=Failed(FailureKind.UNRECORDED, "no trial of this choice")))
    assert "1 not recorded · dropped: 2 slow, 1 wrong" in status_line(progress)


def test_the_best_so_far_is_kernels_then_layer_then_entry(progress):
    row = progress.rows[16]
    progress.update(trial(Subject.GATE_UP, 8.0))
    assert row.layer_us is None
    progress.update(trial(Subject.DOWN, 4.0))
    progress.update(trial(Subject.GATE_UP, 7.0))
    progress.update(trial(Subject.GATE_UP, 9.0))
    assert row.layer_us == 11.0
    progress.update(trial(Subject.LAYER, 12.5))
    assert row.layer_us == 12.5
    progress.update(TokenDone(entry()))
    assert row.layer_us == 10.0
    assert row_text(row) == "10.0 us, 1.20x the default's speed, 90% of the bound"


def test_a_compile_failure_of_no_token_count_adds_no_row(progress):
    progress.update(trial(Subject.DOWN, 0, tokens=0, failure=Failed(FailureKind.COMPILE, "ptxas")))
    assert set(progress.rows) == {1, 16}


def test_the_live_view_fits_80_columns_and_24_lines_with_the_whole_ladder(progress):
    from rich.console import Console

    from moetune.cli.options import SWEEP_TOKENS, parse_tokens

    ladder = parse_tokens(SWEEP_TOKENS)
    progress.update(SweepStarted("cuda", TARGETS["sm_90"], SHAPE, ladder, Path("trials.sqlite"), 0))
    for count in ladder:
        progress.update(TokenDone(entry(tokens=count, median_us=123456.7, baseline_us=130000.0)))
    sink = StringIO()
    Console(file=sink, width=80).print(live_view(progress))
    lines = sink.getvalue().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "123457" in sink.getvalue()


def test_a_terminal_gets_a_live_view_that_leaves_only_the_lines_that_matter(monkeypatch):
    class Terminal(StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with sweep_display() as on_event:
        on_event(SweepStarted("cuda", TARGETS["sm_90"], SHAPE, (1, 16), Path("trials.sqlite"), 0))
        on_event(TokenStarted(1, 1, 2))
        on_event(TokenDone(entry(tokens=1)))
        on_event(Warned("the clocks fell by [bold]10%[/bold]"))
    text = screen.getvalue()
    assert "warning: the clocks fell by [bold]10%[/bold]" in text
    assert "of bound" in text
    assert text.endswith("\x1b[2K")  # the view itself is wiped: results follow on stdout


def test_plain_lines_go_to_stderr_one_per_thing_that_happened(capsys):
    log = PlainLines(SweepProgress())
    log(SweepStarted("replay", TARGETS["sm_90"], SHAPE, (16,), Path("trials.sqlite"), 40))
    reasons = {"needs N B of shared memory": 60, "a": 9, "b": 7, "c": 2, "d": 1}
    log(SpaceReady(Role.DOWN, 40, 900, reasons, {"outside --structures gather": 1234}, 5, {232_448: 800, 115_712: 100}))
    log(CompileProgress(40, 40, 0))
    log(SpaceCompiled(Role.DOWN, 38, {"over --max-smem 98304": 2}))
    log(TokenStarted(16, 1, 1))
    log(trial(Subject.LAYER, 10.0))
    log(TokenDone(entry()))
    log(CountersStarted(1))
    log(Warned("the clocks fell"))
    log(TokenFailed(16384, "out of memory"))
    log(TokenRefused(8192, "the GPU was held down"))
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert lines[0] == "replay: e8_h64_i64_k2_bf16 on NVIDIA H200, 40 trials known from trials.sqlite"
    assert lines[1:5] == [
        "down: 40 candidates of 900 that can run inside the limits (79 cannot, 5 duplicates dropped)",
        "  limits: 1,234 outside --structures gather",
        "  cannot: 60 needs N B of shared memory; 9 a; 7 b; 3 for 2 other reasons",
        "  shared memory of a block: 100 up to 115,712 B, 800 up to 232,448 B",
    ]
    assert lines[6] == "down: 38 compiled candidates are inside the limits (2 over --max-smem 98304)"
    assert lines[7].startswith("16 tokens: 10.0 us, 1.20x the default's speed, 90% of the bound")
    assert lines[-3:] == [
        "warning: the clocks fell",
        "16384 tokens: no entry, out of memory",
        "8192 tokens: no entry, the GPU was held down",
    ]


def test_plain_lines_of_a_long_sweep_tell_each_thing_once(capsys, clock):
    log = PlainLines(SweepProgress(clock=clock))
    log(SweepStarted("cuda", TARGETS["sm_90"], SHAPE, (1, 16), Path("trials.sqlite"), 0))
    for done in range(41):
        log(CompileProgress(done, 40, 0))
        clock.now_s += 0.5
    for place, tokens in ((1, 1), (2, 16)):
        log(TokenStarted(tokens, place, 2))
        for done in range(10):
            clock.now_s += 2
            log(CompileProgress(done, 9, 0))
            log(trial(Subject.DOWN, 5.0, tokens=tokens))
        log(TokenDone(entry(tokens=tokens)))
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == [
        "compiling 0/40",
        "compiling 20/40 · 2.0 candidates/s · ETA 0:10",
        "compiling 40/40 · 2.1 candidates/s",
        "1 token: 10.0 us, 1.20x the default's speed, 90% of the bound · measuring 1/2 · 0.6 candidates/s · ETA 0:20",
        "16 tokens: 10.0 us, 1.20x the default's speed, 90% of the bound · measuring 2/2 · 0.6 candidates/s",
    ]


def test_the_results_fit_80_columns():
    from rich.console import Console

    from moetune.cli.results import tuned_table

    rows = {count: entry(tokens=count, median_us=98765.4, baseline_us=123456.7) for count in (1, 16384)}
    rows[1] = replace(rows[1], plan=LayerPlan(gate_up=WIDE, down=replace(WIDE, structure=Structure.TMA)))
    sink = StringIO()
    Console(file=sink, width=80).print(tuned_table(rows))
    text = sink.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "4120c" in text
    assert "p128x256 t256" in text
    assert "1.25x" in text


def test_another_routing_than_uniform_stands_in_the_first_line(capsys):
    log = PlainLines(SweepProgress())
    log(SweepStarted("cuda", TARGETS["sm_90"], SHAPE, (16,), Path("trials.sqlite"), 0, "zipf:1.1"))
    assert capsys.readouterr().err == "cuda: e8_h64_i64_k2_bf16 on NVIDIA H200, zipf:1.1 routing\n"


def test_a_gpu_that_another_sweep_has_is_one_line_and_a_phase(capsys):
    progress = SweepProgress()
    log = PlainLines(progress)
    log(GpuAwaited("NVIDIA H200 (GPU-1234)", "process 4711, since 2026-12-01 08:00:00 UTC: moetune sweep"))
    assert status_line(progress) == "waiting for the GPU"
    said = "waiting for NVIDIA H200 (GPU-1234), which is in use by process 4711, since 2026-12-01 08:00:00 UTC: moetune sweep\n"
    assert capsys.readouterr() == ("", said)
    log(SweepStarted("cuda", TARGETS["sm_90"], SHAPE, (16,), Path("trials.sqlite"), 0))
    log(CompileProgress(1, 4, 0))
    assert status_line(progress).startswith("compiling 1/4")
