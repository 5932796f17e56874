"""Every planted fault: how a kernel or a layer can be wrong and look right."""

from __future__ import annotations

import torch

from moetune.measure.inputs import make_rows
from moetune_kernels.config import Role
from moetune_kernels.route import route_reference
from tests.measure.planted import ALL_TOUCHED, CPU, Right, layer_of, right_layer


class DropsTheInnerTail(Right):
    def product(self, rows, weights):
        return super().product(rows[:, :-16], weights[:, :-16])


class SkipsAnExpert(Right):
    skipped = 1

    def block(self, launch, expert, positions):
        if expert != self.skipped:
            super().block(launch, expert, positions)


class LastExpertReadsTheFirst(Right):
    def values(self, launch, expert, positions):
        return super().values(launch, 0 if expert == len(launch.weights) - 1 else expert, positions)


class SkipsTheLastRowOfABlock(Right):
    def store(self, launch, positions, values):
        past = positions - positions[0] + 1
        keep = (past % launch.order.block_m != 0) & (past < len(past))
        super().store(launch, positions[keep], values[keep])


class LeavesRowsOut(Right):
    """Every eighth row: shows only where the output does not hold an earlier kernel's right answer."""

    def store(self, launch, positions, values):
        keep = positions % 8 != 3
        super().store(launch, positions[keep], values[keep])


class KeepsWhatTheOutputHeld(Right):
    def store(self, launch, positions, values):
        held = launch.out[launch.places(positions)].float()
        super().store(launch, positions, torch.where(positions[:, None] % 8 == 3, held, values))


class Races(Right):
    """A column tile comes out halved where ``when`` the launch says so."""

    def when(self, launch):
        return launch.number * 2654435761 % 2**32 < 2**32 // 4

    def values(self, launch, expert, positions):
        values = super().values(launch, expert, positions)
        if self.when(launch):
            values[:, :16] /= 2
        return values


class WrongInItsFirstLaunch(Races):
    def when(self, launch):
        return launch.number == 1


class WrongFromThe20thLaunch(Races):
    def when(self, launch):
        return launch.number >= 20


class RacesBackToBack(Races):
    def when(self, launch):
        return launch.in_a_row > 1 and not launch.cold


class RacesWhenCold(Races):
    def when(self, launch):
        return launch.cold


class WrongWhenAllGoToOneExpert(Races):
    def when(self, launch):
        return launch.tokens > 1 and max(launch.counts) == launch.routed


class WrongForATokenCountOffTheBlock(Races):
    def when(self, launch):
        return launch.tokens % launch.order.block_m != 0


class WrongForOneToken(Races):
    def when(self, launch):
        return launch.tokens == 1


class WrongAfterAnEmptyExpert(Right):
    def values(self, launch, expert, positions):
        values = super().values(launch, expert, positions)
        return values / 2 if 0 in launch.counts[:expert] else values


class WrongPast256RowsOfAnExpert(Right):
    def values(self, launch, expert, positions):
        values = super().values(launch, expert, positions)
        values[positions - int(launch.order.expert_offsets[expert]) >= 256] = 0
        return values


class AnswersBySize(Right):
    """Right once per size, then the same answer whatever the rows are: a cache that forgot to look at them."""

    def __init__(self):
        self.answers = {}

    def run(self, launch):
        if launch.out.shape not in self.answers:
            super().run(launch)
            self.answers[launch.out.shape] = launch.out.clone()
        launch.out.copy_(self.answers[launch.out.shape])


class ReturnsThePreviousOutput(Right):
    previous = None

    def run(self, launch):
        super().run(launch)
        now = launch.out.clone()
        if self.previous is not None:
            rows = min(len(now), len(self.previous))
            launch.out[:rows] = self.previous[:rows]
        self.previous = now


class RightOnOneSeed(Right):
    """Right on the first rows that it meets."""

    first = None

    def values(self, launch, expert, positions):
        seen = float(launch.source[0, 0])
        self.first = seen if self.first is None else self.first
        return super().values(launch, expert, positions) * (1.0 if seen == self.first else 1.1)


class WritesARowPast(Right):
    def run(self, launch):
        super().run(launch)
        beside(launch.out)[-1] = 1.0


class WritesARowBefore(Right):
    def run(self, launch):
        super().run(launch)
        beside(launch.out)[0] = 1.0


def beside(out):
    """Return the rows and one more at either end."""
    rows, columns = out.shape
    return out.as_strided((rows + 2, columns), (columns, 1), out.storage_offset() - columns)


class WritesRowsThatAreNotRouted(Right):
    def run(self, launch):
        super().run(launch)
        if launch.routed < len(launch.out):
            launch.out[launch.places(torch.arange(launch.routed, len(launch.out)))] = 0.0


class WritesToItsInputs(Right):
    def run(self, launch):
        super().run(launch)
        launch.source[-1].zero_()


class WritesToInputsThatItDoesNotUse(Right):
    """Clears rows of x, or router weights, of slots that are not routed: no output shows it."""

    def run(self, launch):
        super().run(launch)
        idle = launch.order.slots[launch.routed :].long()
        if launch.role is Role.DOWN:
            launch.topk_weights.view(-1)[idle] = 0.0
        else:
            busy = launch.order.slots[: launch.routed].long() // launch.top_k
            launch.source[[token for token in (idle // launch.top_k).tolist() if token not in busy.tolist()]] = 0.0


class HasANaN(Right):
    def values(self, launch, expert, positions):
        values = super().values(launch, expert, positions)
        values[0, 0] = float("nan")
        return values


class HasOneElementOff(Right):
    """By a twentieth of what is typical of its row: under every limit of a row, and of many rows together."""

    def run(self, launch):
        super().run(launch)
        if launch.routed > 16:
            row = launch.out[launch.places(torch.tensor([0]))[0]]
            typical = row.float().square().mean().sqrt()
            row[row.abs().argmin()] += (0.05 * typical).to(row.dtype)


class SumsIn16Bits(Right):
    """Rounds its sums a few times on the way; a row of 4,096 by tiles of 64 would be rounded 64 times."""

    def product(self, rows, weights):
        total = torch.zeros(len(rows), len(weights), dtype=rows.dtype)
        tile = 16 if rows.shape[1] == 64 else 8  # of H and of I
        for start in range(0, rows.shape[1], tile):
            inner = slice(start, start + tile)
            total = (total.float() + rows[:, inner].float() @ weights[:, inner].float().t()).to(rows.dtype)
        return total.float()


class SwapsGateAndUp(Right):
    def activated(self, gate, up):
        return super().activated(up, gate)


class ForgetsTheActivation(Right):
    def activated(self, gate, up):
        return gate * up


class OverflowsInTheActivation(Right):
    def activated(self, gate, up):
        return gate * gate.exp() / (1.0 + gate.exp()) * up


class WeighsTwice(Right):
    def weighted(self, values, weight):
        return values * weight * weight


class DoesNotWeigh(Right):
    def weighted(self, values, weight):
        return values


class WeighsByPosition(Right):
    """Takes the router weight of the sorted position, not of the slot that stands there."""

    def values(self, launch, expert, positions):
        weight = launch.topk_weights.flatten()[positions, None]
        return self.product(launch.source[positions], launch.weights[expert]) * weight


class ClipsLargeValues(Right):
    def weighted(self, values, weight):
        return super().weighted(values.clamp(-12.0, 12.0), weight)


class DividesByTheRowsSize(Right):
    """Scales each row to one and back, as quantised activations do: 0 / 0 on a row of zeros."""

    def product(self, rows, weights):
        size = rows.float().abs().amax(dim=1, keepdim=True)
        return (rows.float() / size) @ weights.float().t() * size


BOTH = tuple(Role)
GATE_UP, DOWN = (Role.GATE_UP,), (Role.DOWN,)
# Kind: the fault, the GEMMs that can have it, and words of the reason that it is refused with.
KINDS = {
    "drops the tail of the inner dimension": (DropsTheInnerTail, BOTH, "timing inputs: relative L2 error"),
    "skips one expert": (SkipsAnExpert, BOTH, "timing inputs: .* not finite"),
    "reads the first expert's weights for the last one": (LastExpertReadsTheFirst, BOTH, "timing inputs: relative L2"),
    "skips the last row of a block": (SkipsTheLastRowOfABlock, BOTH, "timing inputs: .* not finite"),
    "writes nothing for some rows": (LeavesRowsOut, BOTH, "timing inputs: .* not finite"),
    "keeps rows that an earlier launch left": (KeepsWhatTheOutputHeld, BOTH, "timing inputs: .* not finite"),
    "races: a quarter of its launches is wrong": (Races, BOTH, "relative L2 error"),
    "races only back to back": (RacesBackToBack, BOTH, "burst of 2 launches"),
    "races only when the L2 is cold": (RacesWhenCold, BOTH, "after timing: relative L2"),
    "is wrong in its first launch": (WrongInItsFirstLaunch, BOTH, "timing inputs: relative L2"),
    "is wrong from its 20th launch on": (WrongFromThe20thLaunch, BOTH, "after timing: relative L2"),
    "is wrong when all slots go to one expert": (WrongWhenAllGoToOneExpert, BOTH, "all slots to expert 0: relative L2"),
    "is wrong for a token count off the block": (WrongForATokenCountOffTheBlock, BOTH, "a row past full blocks: rel"),
    "is wrong for one token": (WrongForOneToken, BOTH, "one token: relative L2"),
    "is wrong after an empty expert": (WrongAfterAnEmptyExpert, BOTH, "expert 1 left empty: relative L2"),
    "is wrong past 256 rows of an expert": (WrongPast256RowsOfAnExpert, BOTH, "a row past full blocks: "),
    "answers by size": (AnswersBySize, BOTH, "another seed: relative L2"),
    "returns the output of the previous input": (ReturnsThePreviousOutput, BOTH, "another seed: relative L2"),
    "is right on one seed only": (RightOnOneSeed, BOTH, "another seed: relative L2"),
    "writes a row past its last": (WritesARowPast, BOTH, "timing inputs: wrote .* values past its last row"),
    "writes a row before its first": (WritesARowBefore, BOTH, "timing inputs: wrote .* values before its first row"),
    "writes rows that are not routed": (WritesRowsThatAreNotRouted, BOTH, "ids outside 0..E-1: wrote .* not routed"),
    "writes to its inputs": (WritesToItsInputs, BOTH, "another seed: wrote to its inputs"),
    "writes to inputs that it does not use": (
        WritesToInputsThatItDoesNotUse,
        BOTH,
        "ids outside 0..E-1: wrote to its inputs",
    ),
    "has a NaN in one element": (HasANaN, BOTH, "timing inputs: .* not finite"),
    "has one element off": (HasOneElementOff, BOTH, "timing inputs: row .*, column .* is"),
    "sums in 16 bits": (SumsIn16Bits, BOTH, "timing inputs: relative L2 error"),
    "swaps gate and up": (SwapsGateAndUp, GATE_UP, "timing inputs: relative L2 error"),
    "forgets the activation": (ForgetsTheActivation, GATE_UP, "timing inputs: relative L2 error"),
    "overflows in the activation": (
        OverflowsInTheActivation,
        GATE_UP,
        "large values and a row of zeros: .* not finite",
    ),
    "applies the router weight twice": (WeighsTwice, DOWN, "timing inputs: relative L2 error"),
    "does not apply the router weight": (DoesNotWeigh, DOWN, "timing inputs: relative L2 error"),
    "takes the router weight of another slot": (WeighsByPosition, DOWN, "timing inputs: relative L2 error"),
    "clips large values": (ClipsLargeValues, DOWN, "large values and a row of zeros: relative L2"),
    "divides by the size of its rows": (DividesByTheRowsSize, BOTH, "large values and a row of zeros: .* not finite"),
}


def layer_fault(change):
    """Return a layer whose output ``change(out, call)`` alters; ``call`` counts from 1."""

    def make():
        calls = []

        def run(x, weights, logits, routing, plan):
            calls.append(x)
            return change(right_layer(x, weights, logits, routing, plan), len(calls), x, logits)

        return run

    return make


def routed_by(change):
    """Return a layer that runs on ``change(topk_weights, topk_ids)``."""

    def run(x, weights, logits, routing, plan):
        return layer_of(x, weights, *change(*route_reference(logits, routing[0])))

    return lambda: run


def first_slot_alone(topk_weights, topk_ids):
    dropped = topk_ids.clone()
    dropped[:, 1:] = -1
    return topk_weights, dropped


def previous_output():
    kept = []

    def run(x, weights, logits, routing, plan):
        kept.append(right_layer(x, weights, logits, routing, plan))
        return kept[-2] if len(kept) > 1 and kept[-2].shape == kept[-1].shape else kept[-1]

    return run


TIMED_X = make_rows(*ALL_TOUCHED, CPU, 5).x


def is_same(logits):
    return bool((logits[:, 0] > 16).all())


LAYER_KINDS = {
    "applies the router weight twice": (routed_by(lambda w, ids: (w * w, ids)), "timing inputs: relative L2"),
    "does not apply the router weight": (
        routed_by(lambda w, ids: (torch.ones_like(w), ids)),
        "timing inputs: relative",
    ),
    "swaps two tokens' weights": (routed_by(lambda w, ids: (w.flip(0), ids)), "timing inputs: relative L2"),
    "adds only one of a token's experts": (routed_by(first_slot_alone), "timing inputs: relative L2"),
    "sends a token to the next expert": (routed_by(lambda w, ids: (w, (ids + 1) % 4)), "timing inputs: relative L2"),
    "leaves its last row": (
        layer_fault(lambda out, call, x, logits: out.index_fill(0, torch.tensor([len(out) - 1]), float("nan"))),
        "timing inputs: 1 of 16 rows are not finite",
    ),
    "has one element off": (
        layer_fault(lambda out, call, x, logits: out + (torch.arange(out.numel()).view(out.shape) == 70) * 0.04),
        "timing inputs: row 1",
    ),
    "knows the rows that are timed": (
        layer_fault(lambda out, call, x, logits: out * (1.2 if len(x) == 16 and not torch.equal(x, TIMED_X) else 1.0)),
        "another seed: relative L2",
    ),
    "is wrong from its 20th replay on": (
        layer_fault(lambda out, call, x, logits: out * (1.2 if call >= 20 else 1.0)),
        "after timing: relative L2",
    ),
    "is wrong when all tokens go the same way": (
        layer_fault(lambda out, call, x, logits: out * (1.2 if is_same(logits) else 1.0)),
        "all tokens to the same experts: relative L2",
    ),
    "is wrong for one token": (
        layer_fault(lambda out, call, x, logits: out * (1.2 if len(x) == 1 else 1.0)),
        "one token: relative L2",
    ),
    "returns the output of the previous input": (previous_output, "another seed: relative L2"),
}
