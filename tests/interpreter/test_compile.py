"""torch.compile sees the layer as one node: whole graphs, token counts that change, ``out``, and no hidden recompiles."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moetune_kernels import FusedMoE, LayerPlan, MoEKernelConfig, Structure, fused_moe, fused_moe_forward, route
from moetune_kernels.errors import ShapeError

SMALL = MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=32, block_k=32)
PLAN = LayerPlan(gate_up=SMALL, down=SMALL)
GEN = torch.Generator().manual_seed(0)
GATE = torch.randn(6, 64, generator=GEN).half()
W13, W2 = (torch.randn(6, 64, 64, generator=GEN) / 8).half(), (torch.randn(6, 64, 32, generator=GEN) / 6).half()
MODULE = FusedMoE(64, 32, 6, dtype=torch.float16)


def rows(tokens):
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens)).half()


def routed(tokens):
    return route(torch.randn(tokens, 6, generator=torch.Generator().manual_seed(tokens)), 2)


def plain(tokens):
    return (lambda x, weights, ids: fused_moe(x, W13, W2, weights, ids, plan=PLAN) * 2), (rows(tokens), *routed(tokens))


def into_out(tokens):
    def run(x, weights, ids, out):
        return fused_moe(x, W13, W2, weights, ids, out=out) + out

    return run, (rows(tokens), *routed(tokens), torch.zeros(tokens, 64).half())


def forward(tokens):
    return (lambda x: fused_moe_forward(x, GATE, (W13, W2), 2, plan=PLAN) * 2), (rows(tokens),)


def module(tokens):
    return (lambda x: MODULE(x[None]) + 1), (rows(tokens),)


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", [plain, into_out, forward, module])
@pytest.mark.parametrize("dynamic", [None, True], ids=["as-torch-decides", "dynamic"])
def test_whole_graphs_give_the_layers_result_and_new_token_counts_stop_recompiling(case, backend, dynamic):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(case(5)[0], fullgraph=True, backend=counter, dynamic=dynamic)
    for tokens in (5, 9, 33, 17):
        run, args = case(tokens)
        want = run(*(tensor.clone() for tensor in args))
        assert torch.equal(compiled(*args), want), tokens
    assert counter.frame_count <= 2  # the first count, then any count


def test_a_mistake_inside_a_graph_is_the_same_sentence():
    compiled = torch.compile(lambda x: fused_moe_forward(x, GATE.float(), (W13, W2)), backend="eager")
    with pytest.raises(ShapeError, match="gate_weights must be"):
        compiled(rows(5))
