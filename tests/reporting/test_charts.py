"""Charts that can be read: no text on another text, a legend outside the data, numbers that are right."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from moetune.outcome import Failed, FailureKind, Stage, Subject, Trial
from moetune.reporting import bound_chart, heatmap, roofline, theme, time_chart
from moetune.reporting.assemble import assemble
from moetune.reporting.facts import Section, TrialSet
from moetune.reporting.heat_grid import heat_grids
from moetune.reporting.tables import Located
from moetune.reporting.wording import plain, short
from moetune_kernels.config import MoEKernelConfig, Role, Structure
from moetune_kernels.shape import MoEShape
from moetune_kernels.table import TunedTable
from tests.reporting import made_up

MIXTRAL = MoEShape(hidden=4096, inter=14336, local_experts=8, top_k=2)
SHAPES = (made_up.DEFAULT_SHAPE, made_up.QWEN3_30B, MIXTRAL)
LADDERS = {
    "default": made_up.TOKENS,
    "one": (64,),
    "three": (1, 64, 4096),
    "dense": tuple(range(1, 1200, 9)),
    "every-count-to-40": tuple(range(1, 41)),
}


def section(shape: MoEShape, tokens: tuple[int, ...] = made_up.TOKENS, *, counted: bool = True) -> Section:
    return section_of(made_up.table(shape, tokens=tokens, counted=counted), tuple(made_up.trials(shape)))


def section_of(value: dict[str, Any], trials: tuple[Trial, ...] = ()) -> Section:
    table = TunedTable.parse(json.dumps(value).encode(), "made up")
    assert table.faults == ()
    return assemble(Located(table, Path("made-up.json")), TrialSet(trials=trials, origin="made up"), set())


def texts_of(figure: Figure) -> list[tuple[str, Bbox]]:
    """Return every visible text with its box, after drawing."""
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()
    renderer = canvas.get_renderer()
    found = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    frame = figure.bbox
    boxes = [(text.get_text(), Text.get_window_extent(text, renderer)) for text in found]
    return [(text, box) for text, box in boxes if box.overlaps(frame)]


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    pairs = itertools.combinations(texts_of(figure), 2)
    return [(one, other) for (one, a), (other, b) in pairs if a.shrunk(0.98, 0.9).overlaps(b.shrunk(0.98, 0.9))]


def draw(kind: str, shown: Section) -> Figure:
    assert shown.trials is not None
    grids = [grid for role in Role for grid in heat_grids(shown.trials.trials, role)]
    with theme.drawing():
        return {
            "roofline": lambda: roofline.draw_roofline(shown),
            "times": lambda: time_chart.draw_times(shown),
            "bound": lambda: bound_chart.draw_bound_shares(shown),
            "heatmap": lambda: heatmap.draw_heatmap(shown, grids),
        }[kind]()


@pytest.mark.parametrize("counted", [True, False], ids=["counters", "no-counters"])
@pytest.mark.parametrize("tokens", LADDERS.values(), ids=LADDERS)
@pytest.mark.parametrize("kind", ["roofline", "times", "bound"])
def test_no_text_covers_another(kind, tokens, counted):
    for shape in SHAPES:
        with theme.drawing():
            figure = draw(kind, section(shape, tokens, counted=counted))
            assert overlapping(figure) == [], shape


def test_no_text_of_the_heatmap_covers_another():
    with theme.drawing():
        assert overlapping(draw("heatmap", section(MIXTRAL))) == []


@pytest.mark.parametrize("kind", ["roofline", "times", "bound"])
def test_the_legend_stands_outside_the_data(kind):
    with theme.drawing():
        figure = draw(kind, section(made_up.DEFAULT_SHAPE))
        figure.canvas.draw()
        found = [(axes.get_window_extent(), axes.get_legend()) for axes in figure.axes]
        legends = [(frame, legend) for frame, legend in found if legend is not None]
        assert legends
        for frame, legend in legends:
            box = legend.get_window_extent()
            assert box.y0 >= frame.y1 - 1
            assert box.x1 <= figure.bbox.x1


def test_every_text_of_a_picture_is_inside_it():
    for kind in ("roofline", "times", "bound", "heatmap"):
        with theme.drawing():
            figure = draw(kind, section(made_up.DEFAULT_SHAPE))
            for text, box in texts_of(figure):
                assert box.x0 >= 0, text
                assert box.x1 <= figure.bbox.x1, text
                assert box.y0 >= 0, text
                assert box.y1 <= figure.bbox.y1, text


def test_hollow_points_are_analytical_and_solid_ones_counted():
    shown = section(MIXTRAL, (1, 64, 4096))
    axes = draw("roofline", shown).axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    hollow = lines["tuned plan, least bytes (label: tokens)"]
    solid = lines["the same plan under hardware counters"]
    work = [(made_up.flops(MIXTRAL, tokens), made_up.touched_bytes(MIXTRAL, tokens)) for tokens in (1, 64, 4096)]
    assert hollow.get_xdata() == pytest.approx([flops / moved for flops, moved in work], rel=1e-3)
    assert solid.get_xdata() == pytest.approx([0.9 * flops / moved for flops, moved in work], rel=1e-3)
    times = [point.median_us for point in shown.points]
    rates = [flops / us * 1e-6 for (flops, _), us in zip(work, times, strict=True)]
    assert hollow.get_ydata() == pytest.approx(rates)
    assert solid.get_ydata() == pytest.approx(
        [0.99 * rate for rate in rates], rel=1e-3
    )  # 0.9 of the one, 1.1 of the other
    assert hollow.get_markerfacecolor() != hollow.get_markeredgecolor()


def test_no_point_of_few_tokens_is_faster_than_the_experts_that_were_touched_allow():
    value = made_up.table(MIXTRAL, tokens=(2,))
    three_experts = 3 * MIXTRAL.expert_bytes + 4.0 * 2 * MIXTRAL.hidden  # an even router touches 3.5 of 8
    bound_us = three_experts / made_up.BYTES_PER_S * 1e6
    value["entries"]["2"] |= {"bound_us": bound_us, "median_us": bound_us}
    four_experts = made_up.flops(MIXTRAL, 2) / (4 * MIXTRAL.expert_bytes)
    value["entries"]["2"]["flops_per_byte"] = {"value": four_experts, "source": "counter"}
    value["entries"]["2"]["bandwidth_gbps"] = {"value": 4200.0, "source": "counter"}
    (point,) = section_of(value).points
    assert point.bytes == pytest.approx(three_experts)
    assert point.tflops / point.intensity == pytest.approx(made_up.BYTES_PER_S * 1e-12)
    assert point.counted == pytest.approx((four_experts, four_experts * 4.2))


@pytest.mark.parametrize("bound_us", [0.0, 1e-3, 1e9])
def test_a_bound_that_no_routing_explains_leaves_the_expectation(bound_us):
    value = made_up.table(MIXTRAL, tokens=(2,))
    value["entries"]["2"]["bound_us"] = bound_us
    (point,) = section_of(value).points
    assert point.bytes == pytest.approx(made_up.touched_bytes(MIXTRAL, 2))


def test_a_picture_of_a_replay_says_so():
    value = made_up.table(MIXTRAL, tokens=(1, 64), backend="replay")
    for kind in ("roofline", "times", "bound"):
        assert draw(kind, section_of(value)).get_suptitle().endswith(" · replay")


def test_a_picture_of_a_skewed_routing_says_so():
    value = made_up.table(MIXTRAL, tokens=(1, 64)) | {"routing": "zipf:1.1"}
    assert draw("times", section_of(value)).get_suptitle().endswith(" · zipf:1.1 routing")


def test_without_counters_no_point_claims_to_be_counted():
    axes = draw("roofline", section(MIXTRAL, counted=False)).axes[0]
    assert "counters" not in " ".join(str(line.get_label()) for line in axes.get_lines())


def test_the_measured_roof_is_bold_and_the_nominal_one_thin():
    axes = draw("roofline", section(MIXTRAL)).axes[0]
    roofs = {str(line.get_label()).split()[0]: line for line in axes.get_lines() if "roofs" in str(line.get_label())}
    assert roofs["measured"].get_linewidth() > 2 * roofs["nominal"].get_linewidth()
    assert np.max(roofs["measured"].get_ydata()) == pytest.approx(780)
    assert np.max(roofs["nominal"].get_ydata()) == pytest.approx(989)


def test_the_speedup_bars_are_default_over_tuned():
    shown = section(MIXTRAL, (1, 64, 4096))
    below = draw("times", shown).axes[1]
    expected = [(point.baseline_us or 0) / point.median_us for point in shown.points]
    assert [bar.get_height() for bar in below.patches if isinstance(bar, Rectangle)] == pytest.approx(expected)


def test_a_table_without_default_times_says_so():
    shown = section(MIXTRAL, (1, 64))
    points = tuple(dataclasses.replace(point, baseline_us=None) for point in shown.points)
    below = draw("times", dataclasses.replace(shown, points=points)).axes[1]
    assert "no times of the default plan" in below.texts[0].get_text()
    assert not below.patches


def test_a_cell_is_the_best_of_its_tile_and_failures_are_counted_apart():
    grids = {(grid.role, grid.tokens): grid for role in Role for grid in heat_grids(made_up.trials(MIXTRAL), role)}
    assert sorted({tokens for _, tokens in grids}) == [1, 64, 4096]
    grid = grids[Role.GATE_UP, 4096]
    assert grid.best_us == pytest.approx(made_up.bound_us(MIXTRAL, 4096) * 0.66 * 1.05)
    assert grid.cells[128, 256].best_us is None
    assert grid.cells[128, 256].failures == {FailureKind.RESOURCES: 1}
    assert grid.failures[FailureKind.WRONG] == 1
    assert grid.measured + sum(grid.failures.values()) == 16
    assert {kind for kind, _, _ in grid.reasons} == set(grid.failures)


def test_failures_that_differ_in_their_numbers_only_are_one_reason():
    config = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64)
    said = [f"its first launch took {us} us, over 2.5 times the best so far (114.6 us)" for us in (286.7, 298.0, 30)]
    trials = [
        Trial(
            subject=Subject.GATE_UP,
            tokens=1,
            choice=dataclasses.replace(config, num_warps=2 << place),
            stage=Stage.SCREEN,
            outcome=Failed(kind, reason),
        )
        for place, (kind, reason) in enumerate(
            [(FailureKind.COMPILE, "no"), *((FailureKind.SLOW, one) for one in said)]
        )
    ]
    (grid,) = heat_grids(trials, Role.GATE_UP)
    assert grid.reasons == ((FailureKind.SLOW, said[0], 3), (FailureKind.COMPILE, "no", 1))


def test_a_config_that_did_not_compile_failed_at_every_token_count():
    config = MoEKernelConfig(structure=Structure.TMA, block_m=16, block_n=16, block_k=16)
    refused = Trial(
        subject=Subject.DOWN,
        tokens=0,
        choice=config,
        stage=Stage.SCREEN,
        outcome=Failed(FailureKind.COMPILE, "ptxas said no"),
    )
    grids = heat_grids([*made_up.trials(MIXTRAL, (1, 64)), refused], Role.DOWN)
    assert [grid.tokens for grid in grids] == [1, 64]
    assert all(grid.cells[16, 16].failures == {FailureKind.COMPILE: 1} for grid in grids)


def test_trials_that_all_failed_still_make_a_heatmap():
    failed = [trial for trial in made_up.trials(MIXTRAL, (1,)) if isinstance(trial.outcome, Failed)]
    grids = heat_grids(failed, Role.GATE_UP)
    assert grids[0].best_us is None
    with theme.drawing():
        texts = [text for text, _ in texts_of(heatmap.draw_heatmap(section(MIXTRAL), grids))]
    assert any("no config passed" in text for text in texts)


def test_foreign_texts_are_cut_and_drawable():
    assert short("x" * 1000, 10) == "x" * 9 + "…"
    assert plain("H200\u6f22\u202e$\\frac\n") == "H200??$\\frac?"
