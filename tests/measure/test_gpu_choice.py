"""Which GPUs a sweep works on: those of one model that nobody uses, each locked, and the rest named in one warning."""

from __future__ import annotations

import threading
import uuid
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from moetune.measure import gpu_choice, gpu_driver
from moetune.measure.clocks import OtherProcess
from moetune.measure.gpu_choice import held_gpus
from moetune.measure.gpu_lock import locked
from moetune.measure.gpu_name import gpu_of
from moetune_kernels.device import TARGETS
from moetune_kernels.errors import UnsupportedDeviceError

H200, A100 = TARGETS["sm_90"], TARGETS["sm_80"]


class Machine:
    """Cards as libcuda and NVML would describe them: name, gigabytes, and who uses it."""

    def __init__(self, *cards):
        self.cards = cards
        self.told = []

    def driver(self):
        def put(target, value):
            target._obj.value = value
            return 0

        def text(buffer, value):
            buffer.value = value
            return 0

        def raw(buffer, device):
            buffer.raw = self.uuid(device.value).bytes
            return 0

        return SimpleNamespace(
            cuInit=lambda flags: 0,
            cuDeviceGetCount=lambda target: put(target, len(self.cards)),
            cuDeviceGet=put,
            cuDeviceGetName=lambda buffer, size, device: text(buffer, self.card(device).name.encode()),
            cuDeviceGetUuid_v2=raw,
            cuDeviceTotalMem_v2=lambda target, device: put(target, self.card(device).memory_bytes),
            cuDeviceGetAttribute=lambda target, number, device: put(target, self.attribute(device, number)),
        )

    def card(self, device):
        return self.cards[device.value]

    def uuid(self, index):
        return uuid.UUID(int=99 - index)  # the last card sorts first

    def attribute(self, device, number):
        card = self.card(device)
        return {16: card.sm_count, 38: card.l2_bytes, 75: card.sm // 10, 76: card.sm % 10, 97: card.smem_limit}[number]

    # who is told

    def waits(self, gpu, holder):
        self.told.append(f"{gpu.index} waits for {holder}")

    def warns(self, text):
        self.told.append(text)


@pytest.fixture
def machine(monkeypatch):
    """Return a function that puts cards into this machine; ``users`` names who uses some of them."""

    def machine(*cards, users=None, busy=None):
        made = Machine(*cards)
        indices = {f"GPU-{made.uuid(index)}": index for index in range(len(cards))}

        class Clocks:
            def __init__(self, gpu):
                self.index = indices[gpu]

            def others(self):
                return (users or {}).get(self.index, ())

            def busy_percent(self):
                return (busy or {}).get(self.index, 0)

            def close(self):
                pass

        monkeypatch.setattr(gpu_driver.ctypes, "CDLL", lambda name: made.driver())
        monkeypatch.setattr(gpu_choice, "Clocks", Clocks)
        return made

    return machine


def held(machine, folder, first=0, beside=None):
    with held_gpus(gpu_of(first), beside, lambda: [folder], machine) as found:
        return [gpu.index for gpu in found.gpus]


def test_all_means_every_card_of_the_first_ones_model(machine, tmp_path):
    here = machine(H200, H200, A100, H200)
    assert held(here, tmp_path) == [0, 1, 3]
    (said,) = here.told
    assert said == f"a table is of one GPU model, here {H200.name}; left out: {gpu_of(2)}"
    assert A100.name in said


def test_cards_of_one_name_that_differ_are_not_mixed(machine, tmp_path):
    from dataclasses import replace

    here = machine(H200, replace(H200, memory_bytes=H200.memory_bytes // 2), replace(H200, sm_count=114))
    assert held(here, tmp_path, beside=(1, 2)) == [0]
    (said,) = here.told
    assert f"memory_bytes {H200.memory_bytes // 2} and not {H200.memory_bytes}" in said
    assert f"sm_count 114 and not {H200.sm_count}" in said


def test_the_first_card_says_which_model(machine, tmp_path):
    assert held(machine(H200, A100, A100), tmp_path, first=1, beside=(2, 0)) == [1, 2]


def test_one_named_card_is_one_card_and_asks_nothing_of_others(machine, tmp_path):
    here = machine(H200, H200)
    assert held(here, tmp_path, first=1, beside=()) == [1]
    assert here.told == []


def test_idle_cards_only_where_none_are_named(machine, tmp_path):
    here = machine(
        H200, H200, H200, H200, users={1: (OtherProcess(4242, None),), 0: (OtherProcess(1, None),)}, busy={3: 60}
    )
    assert held(here, tmp_path) == [0, 2]  # the first one is never left out: a sweep says itself that it is shared
    (said,) = here.told
    assert "4242" in said
    assert "60% busy" in said
    here.told.clear()
    assert held(here, tmp_path, beside=(1, 3)) == [0, 1, 3]
    assert here.told == []


def test_slices_are_not_put_together(machine, tmp_path):
    from dataclasses import replace

    here = machine(*[replace(H200, name=f"{H200.name} MIG 1g.18gb")] * 2)
    assert held(here, tmp_path) == [0]
    assert "which only its own process can describe" in here.told[0]


def test_a_card_that_is_not_there_is_an_error(machine, tmp_path):
    with pytest.raises(UnsupportedDeviceError, match="no CUDA device 7: the driver sees 2"):
        held(machine(H200, H200), tmp_path, beside=(7,))


def test_every_card_is_locked_and_let_go(machine, tmp_path):
    here = machine(H200, H200)
    with held_gpus(gpu_of(0), None, lambda: [tmp_path], here):
        for index in (0, 1):
            with pytest.raises(TimeoutError), locked(gpu_of(index), [tmp_path], refuse, pytest.fail):
                pass
    for index in (0, 1):
        with locked(gpu_of(index), [tmp_path], pytest.fail, pytest.fail) as waited_s:
            assert waited_s == 0.0


def refuse(holder):
    raise TimeoutError(holder)


def test_a_card_of_another_sweep_is_waited_for_only_where_it_is_named(machine, tmp_path):
    here = machine(H200, H200)
    with locked(gpu_of(1), [tmp_path], pytest.fail, pytest.fail):
        assert held(here, tmp_path) == [0]
        assert here.told[0].startswith(f"{gpu_of(1)} is left to another sweep, process ")
        here.told.clear()
        here.waits = lambda gpu, holder: refuse(gpu.index)
        with pytest.raises(TimeoutError, match="1"):
            held(here, tmp_path, beside=(1,))
    with locked(gpu_of(0), [tmp_path], pytest.fail, pytest.fail), pytest.raises(TimeoutError, match="0"):
        held(here, tmp_path)


def test_two_sweeps_that_name_the_same_cards_never_wait_for_each_other(machine, tmp_path):
    here = machine(H200, H200, H200)
    done = []

    def again_and_again(first, *beside):
        done.extend(held(here, tmp_path, first, beside) for _ in range(20))

    threads = [
        threading.Thread(target=again_and_again, args=order, daemon=True) for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 60


def test_what_cannot_be_locked_is_used_with_a_warning_each(machine, tmp_path):
    here = machine(H200, H200)
    (tmp_path / "file").write_text("in the way")
    with ExitStack() as stack:
        found = stack.enter_context(held_gpus(gpu_of(0), None, lambda: [tmp_path / "file"], here))
        assert len(found.gpus) == 2
    assert [said.partition(" cannot be locked")[0] for said in here.told] == [str(gpu_of(0)), str(gpu_of(1))]
