"""A server's start: warm up at 8 tokens, then capture other counts, whose kernels this process never loaded.

A process of its own, with an empty Triton cache, because a kernel that any other test launched is loaded already.
"""

from __future__ import annotations

import sys

import torch

from moetune_kernels import fused_moe, fused_moe_forward, route

EXPERTS, HIDDEN, INTER, TOP_K = 16, 512, 256, 4


def rows(tokens: int, seed: int) -> torch.Tensor:
    """Return tokens [T, H] of a seed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(tokens, HIDDEN, device="cuda", generator=generator).bfloat16()


def main() -> None:
    """Capture 24, 7 and 600 tokens, routed inside and outside the graph, and compare three replays with eager."""
    w13 = torch.randn(EXPERTS, 2 * INTER, HIDDEN, device="cuda").div_(HIDDEN**0.5).bfloat16()
    w2 = torch.randn(EXPERTS, HIDDEN, INTER, device="cuda").div_(INTER**0.5).bfloat16()
    gate = torch.randn(EXPERTS, HIDDEN, device="cuda").div_(HIDDEN**0.5).bfloat16()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return fused_moe_forward(x, gate, (w13, w2), TOP_K)

    def routed_layer(x: torch.Tensor) -> torch.Tensor:
        weights, ids = route(torch.nn.functional.linear(x, gate), TOP_K)
        return fused_moe(x, w13, w2, weights, ids)

    layer(rows(8, 0))
    for tokens in (24, 7, 600):
        for run in (layer, routed_layer):
            x = rows(tokens, 1)
            torch.nn.functional.linear(x, gate)  # torch's own product: its kernels are torch's to load
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run(x)
            for seed in range(2, 5):
                x.copy_(rows(tokens, seed))
                graph.replay()
                if not torch.equal(out, run(x)):
                    raise SystemExit(f"{tokens} tokens, seed {seed}: the replay is not the eager result")
    sys.stdout.write("captured and replayed\n")


if __name__ == "__main__":
    main()
