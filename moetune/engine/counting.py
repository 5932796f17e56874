"""Hardware counters of a sweep's winners: read once at the end, and kept with the trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from moetune.engine.backend import LayerFigures
from moetune.engine.bench import Bench
from moetune.engine.decide import Finalist
from moetune.engine.events import Warned
from moetune.outcome import Failed, Stage, Subject, Trial


def count_winners(bench: Bench, winners: Mapping[int, Finalist], limit_s: float) -> dict[int, LayerFigures]:
    """Return the counted figures of each token count's winner, where there are any; the others are warned of.

    A counted winner's final is written down again with its figures, so that recordings and reports have them.

    Args:
        bench: whose backend counts, and whose journal keeps what was counted.
        winners: the winner of each token count.
        limit_s: wall seconds that this may take.
    """
    counted: dict[int, LayerFigures] = {}
    refused: Counter[str] = Counter()
    plans = {tokens: winner.plan for tokens, winner in winners.items()}
    for tokens, figures in bench.backend.counters(plans, limit_s).items():
        if isinstance(figures, Failed):
            refused[figures.reason] += 1
        else:
            counted[tokens] = figures
            bench.end(_with_figures(tokens, winners[tokens], figures))
    for reason, count in refused.items():
        bench.emit(Warned(f"no hardware counters for {count} of {len(plans)} entries: {reason}"))
    return counted


def _with_figures(tokens: int, winner: Finalist, figures: LayerFigures) -> Trial:
    measured = replace(
        winner.measured,
        flops_per_byte=figures.flops_per_byte,
        bandwidth_gbps=figures.bandwidth_gbps,
        issue_efficiency=figures.issue_efficiency,
    )
    return Trial(
        subject=Subject.LAYER,
        tokens=tokens,
        choice=winner.plan,
        stage=Stage.FINAL,
        outcome=measured,
        verified=True,
    )
