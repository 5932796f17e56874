"""How long each question to a GPU process may take before that process counts as hung.

Limits are for hangs, not for slow GPUs: each is tens of times what an H200 takes. The timer of the process itself gives
up on a kernel after 30 s; these end what it cannot see: a launch that blocks, a copy that waits for a hung kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moetune.models.roofline import layer_work
from moetune_kernels.shape import MoEShape

START_LIMIT_S = 120.0  # torch from a cold disk, CUDA, its libraries
SAMPLE_LIMIT_S = 60.0  # 30 s of the timer's own, and as many to get there
LOAD_S = 60.0  # a kernel that is not in Triton's cache after all is compiled
CEILINGS_LIMIT_S = 120.0
REFERENCE_FLOPS = 2e11  # per second; an H200's float32 reference reaches 2e13
REFERENCE_BYTES_PER_S = 1e10  # weights made, or read by the reference; 8e11
LAYER_LOAD_S = 10.0  # eager run, capture and graph of one plan
ROUND_S = 0.2  # one sample of one plan, flushes included; the slowest layer takes tens of milliseconds
ROUTINGS = 8  # more than are ever timed, the rows' own included

Limits = Callable[[str, Sequence[Any], int], float]

# Methods that compute a float32 reference, or wait for one.
# Those about several kernels have so much for each.
_REFERENCES = frozenset({"open", "verify_kernels", "time_and_recheck_kernels", "verify_layer"})
_LOADS = frozenset({"enter_kernels"})
_SAMPLINGS = {"enter_kernels": 2, "time_and_recheck_kernels": 2}  # the first launch, or the bursts, beside the samples
_LAYERS = {"time_layers": 1, "time_rerouted": ROUTINGS}


class TimeLimits:
    """The limits of one layer's questions, in seconds.

    Args:
        shape: the layer.
    """

    def __init__(self, shape: MoEShape) -> None:
        self._shape = shape

    def __call__(self, method: str, arguments: Sequence[Any], tokens: int) -> float:
        """Return the limit of one question.

        Args:
            method: of the trials; ``start`` is the process's own beginning.
            arguments: what it is called with.
            tokens: the token count that is open, or being opened; 0 for none.
        """
        if method == "start":
            return START_LIMIT_S
        if method == "ceilings":
            return CEILINGS_LIMIT_S
        if method == "settle":  # whatever it was
            return max(self(one, ((), 0), tokens) for one in (*_REFERENCES, *_LOADS))
        if method in _REFERENCES:
            return _SAMPLINGS.get(method, 1) * SAMPLE_LIMIT_S + self._reference_s(tokens)
        if method in _LAYERS:
            plans, rounds = arguments
            return SAMPLE_LIMIT_S + _LAYERS[method] * len(plans) * (LAYER_LOAD_S + ROUND_S * rounds)
        return _SAMPLINGS.get(method, 1) * SAMPLE_LIMIT_S + (LOAD_S if method in _LOADS else 0.0)

    def _reference_s(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        weights_s = self._shape.local_experts * self._shape.expert_bytes / REFERENCE_BYTES_PER_S
        return 2 * weights_s + layer_work(self._shape, tokens).flops / REFERENCE_FLOPS
