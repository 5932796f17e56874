"""Compile for a GPU that is not here: what ``moetune sweep --target`` prints, and what CI checks on every target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moetune.measure.compiler import DEFAULT_LIMIT_S, CompilePool, usable_cores
from moetune.measure.kernel_jobs import PRELOAD, gemm_job
from moetune.outcome import Compiled, Failed
from moetune_kernels.config import MoEKernelConfig, Role
from moetune_kernels.device import DeviceInfo
from moetune_kernels.plan import LayerPlan
from moetune_kernels.shape import MoEShape

Choice = tuple[Role, MoEKernelConfig]


def compile_offline(
    shape: MoEShape,
    device: DeviceInfo,
    choices: Iterable[Choice],
    *,
    workers: int | None = None,
    limit_s: float = DEFAULT_LIMIT_S,
) -> Iterator[tuple[Choice, Compiled | Failed]]:
    """Compile each ``(role, config)`` of ``shape`` for ``device`` and yield its outcome as it ends, in any order.

    Args:
        shape: the layer; bf16 or fp16 weights.
        device: what to compile for, e.g. ``TARGETS["sm_90"]``; it need not be here.
        choices: what to compile; configs that ``why_not`` refuses may crash the compiler, which is then the outcome.
        workers: kernels at the same time; one per core when None, because nothing is measured meanwhile.
        limit_s: seconds for one kernel.

    Raises:
        RunError: the compile process could not start.
    """
    with CompilePool(workers=workers or usable_cores(), limit_s=limit_s, preload=PRELOAD) as pool:
        yield from pool.compile((choice, gemm_job(*choice, shape, device)) for choice in choices)


def plan_choices(plans: Iterable[LayerPlan]) -> list[Choice]:
    """Return the distinct kernel choices of ``plans``, in order."""
    return list(dict.fromkeys((role, plan.config(role)) for plan in plans for role in Role))
