"""Which GPUs a sweep works on: the first one, and those of the same model beside it; each is locked.

Nothing here touches a GPU: the driver and NVML are asked, in milliseconds and without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moetune.measure.card import BUSY_PERCENT
from moetune.measure.clocks import Clocks
from moetune.measure.gpu_device import device_total, driver_device
from moetune.measure.gpu_lock import locked, locked_if_free
from moetune.measure.gpu_name import Gpu, gpu_of
from moetune_kernels.device import DeviceInfo


class Tell(Protocol):
    """Who is told what a user should know of the GPUs."""

    def waits(self, gpu: Gpu, holder: str) -> None:
        """Another sweep has ``gpu``, ``holder`` says which; this one waits."""
        ...

    def warns(self, text: str) -> None:
        """Something else than asked for happens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGpus:
    """GPUs of one model that are this sweep's own.

    Args:
        gpus: the first one first.
        device: what the driver says of each; None where only torch can say, and there is one GPU then.
        waited_s: seconds that other sweeps had them.
    """

    gpus: tuple[Gpu, ...]
    device: DeviceInfo | None
    waited_s: float


@contextmanager
def held_gpus(
    first: Gpu, beside: Sequence[int] | None, folders: Callable[[], Iterable[Path]], tell: Tell
) -> Generator[HeldGpus]:
    """Hold the locks of the first GPU and of those beside it for the block.

    Named GPUs are waited for while another sweep has them, in an order that is the same for every sweep, so that two
    never wait for each other. Where none are named, every visible one is taken that is of the first one's model and idle.

    Args:
        first: which has to be there.
        beside: further CUDA devices, None for every idle one.
        folders: returns where lock files may lie.
        tell: told what is waited for and what is left out.

    Raises:
        UnsupportedDeviceError: there is no such device.
    """
    named = beside is not None
    device = driver_device(first.index) if beside != () else None
    others = _of_one_model(first, device, range(device_total()) if beside is None else beside, tell)
    if not named:
        others = _idle(others, tell)
    with ExitStack() as stack:
        waited_s = 0.0
        for gpu in sorted([first, *others], key=lambda gpu: gpu.key) if named else [first]:
            waited_s += stack.enter_context(locked(gpu, folders(), *_words(gpu, tell)))
        if not named:
            others = [gpu for gpu in others if _is_taken(stack, gpu, folders(), tell)]
        yield HeldGpus(gpus=(first, *others), device=device, waited_s=waited_s)


def _of_one_model(first: Gpu, device: DeviceInfo | None, indices: Iterable[int], tell: Tell) -> list[Gpu]:
    """Return the GPUs that the driver describes as it does the first one; times of two models make no table."""
    found: list[Gpu] = []
    odd: list[str] = []
    for index in dict.fromkeys(indices):
        if index == first.index:
            continue
        other, gpu = driver_device(index), gpu_of(index)
        if device is None or other is None:
            odd.append(f"{gpu}, which only its own process can describe")
        elif other != device:
            odd.append(f"{gpu}{_difference(device, other)}")
        else:
            found.append(gpu)
    if odd:
        tell.warns(f"a table is of one GPU model, here {first.name}; left out: {'; '.join(odd)}")
    return found


def _difference(device: DeviceInfo, other: DeviceInfo) -> str:
    """Say what differs where the name does not."""
    if device.name != other.name:
        return ""
    said = device.to_json()
    return "".join(
        f", {name} {value} and not {said[name]}" for name, value in other.to_json().items() if value != said[name]
    )


def _idle(gpus: Sequence[Gpu], tell: Tell) -> list[Gpu]:
    """Return the GPUs that nobody computes on, as far as NVML says."""
    busy = {gpu: users for gpu in gpus if (users := _users(gpu))}
    if busy:
        named = "; ".join(f"{gpu}: {users}" for gpu, users in busy.items())
        tell.warns(f"GPUs in use are left to their users ({named}); name them with --device to use them all the same")
    return [gpu for gpu in gpus if gpu not in busy]


def _users(gpu: Gpu) -> str:
    """Say who computes on a GPU; nothing where it is idle, or nobody knows."""
    with closing(Clocks(gpu.uuid)) as clocks:
        others, percent = clocks.others(), clocks.busy_percent() or 0
    if others:
        return ", ".join(map(str, others[:2])) + (", …" if len(others) > 2 else "")
    return f"{percent}% busy" if percent >= BUSY_PERCENT else ""


def _is_taken(stack: ExitStack, gpu: Gpu, folders: Iterable[Path], tell: Tell) -> bool:
    _, unlockable = _words(gpu, tell)
    holder = stack.enter_context(locked_if_free(gpu, folders, unlockable))
    if holder is not None:
        tell.warns(f"{gpu} is left to another sweep, {holder}")
    return holder is None


def _words(gpu: Gpu, tell: Tell) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """Return what tells of a GPU that another sweep has, and of one that cannot be locked."""
    unlockable = f"{gpu} cannot be locked, so another sweep on it would disturb this one's times"
    return lambda holder: tell.waits(gpu, holder), lambda reasons: tell.warns(f"{unlockable} ({reasons})")
