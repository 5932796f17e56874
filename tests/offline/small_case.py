"""Two processes of a sweep without a GPU: what the pool compiles beside the GEMMs, and what the GPU process launches.

``small_case.py SIDE TOKENS SHAPE...``: SIDE is ``hashes`` or ``hashes-reversed`` (of every kernel, in the order of first
use), ``pool``, ``launched``, or ``launch`` (which compiles what it misses). Prints one JSON object.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch
import triton

import moetune_kernels
from moetune.measure import compile_worker
from moetune.measure.calls import DTYPES
from moetune.measure.compile_job import pretend_device
from moetune.measure.inputs import ExpertWeights, Rows, slot_order
from moetune.measure.kernel_jobs import PRELOAD
from moetune.measure.odd import LAYER_TOKENS, odd_cases
from moetune.measure.open_count import OpenCount
from moetune.measure.problem import run_layer
from moetune.models.roofline import total_experts
from moetune_kernels.config import MoEKernelConfig, Structure
from moetune_kernels.device import TARGETS
from moetune_kernels.heuristic import heuristic_plan
from moetune_kernels.kernel_call import KernelCall
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

DEVICE = TARGETS["sm_90"]
SMALL = ("route", "permute", "combine")


def hashes(*, backwards):
    """Return every kernel's hash, asked for in one order or the other."""
    names = [module.name for module in pkgutil.walk_packages(moetune_kernels.__path__, "moetune_kernels.")]
    values = {
        f"{name}.{key}": value
        for name in names
        for key, value in vars(importlib.import_module(name)).items()
        if isinstance(value, triton.JITFunction) and value.__module__ == name
    }
    assert len(values) > 15
    return {name: values[name].cache_key for name in sorted(values, reverse=backwards)}


def key_of(call):
    """Return the cache entry that Triton would look a call's binary up in, and compile nothing."""
    from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, make_backend

    found = []

    def compile(source, target, options):  # noqa: A001  # Triton's name
        backend = make_backend(target)
        parsed = backend.parse_options(dict(options))
        found.append(f"{source.name} {get_cache_key(source, backend, parsed, get_cache_invalidating_env_vars())}")
        return SimpleNamespace()

    kernel = call.kernel
    kernel.device_caches[DEVICE.sm][0].clear()
    whole, kernel.compile = kernel.compile, compile
    try:
        call.warmup()
    finally:
        kernel.compile = whole
    return found[0]


def pool(shape, tokens):
    from moetune.measure.small_kernels import small_jobs

    return {key_of(call) for _, job in small_jobs(shape, DEVICE, tokens) for call in job.build(*job.args)}


def launched(shape, tokens, note):
    """Do what a sweep does at every count, on memory of the CPU: each call of a small kernel is noted, none launched."""
    from moetune.engine.memory import REACH
    from moetune.space import sensible_block_ms

    KernelCall.launch = lambda call: note(call) if call.kernel.__module__.split(".")[1] in SMALL else None
    shape = replace(shape, inter=64)  # no small kernel knows it, and weights would take gigabytes
    dtype, experts = DTYPES[shape.format], shape.local_experts
    weights = ExpertWeights(
        torch.empty((experts, 128, shape.hidden), dtype=dtype), torch.empty((experts, shape.hidden, 64), dtype=dtype)
    )
    for count in tokens:
        opened = open_count(shape, count)
        heights = {
            block_m
            for other in tokens
            if max(other, count) <= REACH * min(other, count)
            for block_m in (*sensible_block_ms(shape, other), heuristic_plan(shape, other, DEVICE).block_m)
        }
        opened.combine()()
        for block_m in heights:
            config = MoEKernelConfig(structure=Structure.GATHER, block_m=block_m, block_n=32, block_k=32, num_warps=4)
            slot_order(shape, opened.truth.topk_ids, block_m)
            opened.routing(block_m)()
            for case in odd_cases(shape):
                slot_order(
                    shape, torch.zeros((len(case.experts) // shape.top_k, shape.top_k), dtype=torch.int32), block_m
                )
            for asked in (opened, *(open_count(shape, odd) for odd in (LAYER_TOKENS, 1))):
                run_layer(shape, weights, asked.truth.rows, LayerPlan(gate_up=config, down=config))


def open_count(shape, tokens):
    """Open a token count without a truth: its tensors are never read or written."""
    dtype, opened = DTYPES[shape.format], object.__new__(OpenCount)
    rows = Rows(
        torch.empty((tokens, shape.hidden), dtype=dtype), torch.empty((tokens, total_experts(shape)), dtype=dtype)
    )
    ids = torch.empty((tokens, shape.top_k), dtype=torch.int32)
    y = torch.empty((tokens * shape.top_k, shape.hidden), dtype=dtype)
    opened.shape, opened.timed = shape, SimpleNamespace(y=SimpleNamespace(zero_=lambda: y))
    opened.truth = SimpleNamespace(rows=rows, topk_ids=ids, topk_weights=ids.float())
    return opened


def main():
    """Answer one question on standard output."""
    side, tokens, *shapes = sys.argv[1:]
    counts = json.loads(tokens)
    pretend_device(DEVICE)
    if side.startswith("hashes"):
        print(json.dumps(hashes(backwards=side == "hashes-reversed")))
        return
    if side == "pool":
        compile_worker._warm_up(PRELOAD)
    found = {}
    for text in shapes:
        shape, keys = MoEShape(**json.loads(text)), set()
        if side == "pool":
            keys = pool(shape, counts)
        elif side == "launched":
            launched(shape, counts, lambda call, keys=keys: keys.add(key_of(call)))
        else:
            launched(shape, counts, lambda call, keys=keys: keys.add(call.warmup().hash))
        found[text] = sorted(keys)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
