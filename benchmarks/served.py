"""What production would do with a tuned table, checked at every token count of it.

For each token count of the table that serves a layer on this GPU: the plan that the runtime's own lookup gives, whether
the output matches float32, and its time beside the default plan's, interleaved in one process.

    MOETUNE_DEBUG=1 python3 benchmarks/served.py --model qwen3-30b-a3b --json served.json

Exit code 1 when an output does not match, the lookup does not serve the table's entry, or the tuned plan is slower than
the default plan by more than noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from moetune.measure.inputs import ExpertWeights, layer_truth, make_rows, make_weights
from moetune.measure.timer import CapturedLayers, Timer, summarize
from moetune.models.resolve import ShapeRequest, resolve_shape
from moetune_kernels.device import device_info
from moetune_kernels.fused_moe import fused_moe
from moetune_kernels.fused_moe.layer import Weights, moe_from_logits
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.lookup import best_plan, find_table
from moetune_kernels.match import match
from moetune_kernels.route import route
from moetune_kernels.shape import MoEShape

ROUNDS = 30
NOISE = 0.01


@dataclass(frozen=True, slots=True)
class Served:
    """One token count: who serves it, whether its output is right, and both times in microseconds."""

    tokens: int
    source: str
    entry: int | None
    problem: str | None
    tuned_us: float
    default_us: float

    @property
    def is_fault(self) -> bool:
        """Whether this count breaks a promise."""
        slower = self.tuned_us > (1 + NOISE) * self.default_us
        return self.problem is not None or self.entry != self.tokens or slower


def serve(shape: MoEShape, weights: ExpertWeights, tokens: int, timer: Timer) -> Served:
    """Run ``fused_moe`` as production would, compare with float32, and time it against the default plan."""
    device = device_info(0)
    rows = make_rows(shape, tokens, torch.device("cuda", 0), seed=tokens + 17)
    topk_weights, topk_ids = route(rows.logits, shape.top_k)
    got = fused_moe(rows.x, weights.w13, weights.w2, topk_weights, topk_ids)
    problem = match(got, layer_truth(shape, weights, rows), shape.format)
    graphs = CapturedLayers(torch.cuda.Stream())
    default = heuristic_plan(shape, tokens, device)
    layer = Weights(weights.w13, weights.w2)
    replays = [
        graphs.capture(lambda plan=plan: moe_from_logits(rows.x, layer, rows.logits, (shape.top_k, True), plan))
        for plan in (None, default)
    ]
    tuned_times, default_times = timer.rounds(replays, ROUNDS)
    graphs.close()
    found = best_plan(shape, tokens, device)
    return Served(
        tokens, found.source, found.entry_tokens, problem,
        summarize(tuned_times).median_us, summarize(default_times).median_us,
    )  # fmt: skip


def main() -> int:
    """Check one layer's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a catalogue name; the default layer when not given")
    parser.add_argument("--json", type=Path, help="write every row here")
    options = parser.parse_args()
    shape = resolve_shape(ShapeRequest(model=options.model)).shape
    held = find_table(shape, 0)
    if held is None:
        sys.stderr.write(f"no table serves {shape.key} on this GPU; run `moetune sweep` first\n")
        return 1
    table, path = held
    weights = make_weights(shape, torch.device("cuda", 0), seed=1)
    timer = Timer(torch.device("cuda", 0), device_info(0).l2_bytes)
    served = [serve(shape, weights, tokens, timer) for tokens in sorted(table.entries)]
    sys.stdout.write(f"{shape.key}, table {path}\ntokens  served by        tuned us   default us  speed-up  output\n")
    for row in served:
        sys.stdout.write(
            f"{row.tokens:6d}  {row.source:9s} {row.entry!s:>6s} {row.tuned_us:10.1f} {row.default_us:12.1f}"
            f"  {row.default_us / row.tuned_us:8.3f}  {row.problem or 'matches float32'}{'  FAULT' if row.is_fault else ''}\n"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in served], indent=1) + "\n")
    return 1 if any(row.is_fault for row in served) else 0


if __name__ == "__main__":
    raise SystemExit(main())
