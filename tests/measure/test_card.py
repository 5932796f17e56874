"""What is said of a GPU before it is timed, and when a strict sweep refuses it."""

from __future__ import annotations

import pytest

from moetune.measure.card import LOOKS, CardState, card_state, troubles, why_refused
from moetune.measure.clocks import ClockReading, OtherProcess

IDLE, CAP, HOT, BRAKE = 0x1, 0x4, 0x40, 0x80
SETTING, SYNC, DISPLAY = 0x2, 0x10, 0x100  # clocks that somebody set, a group of cards, a display: no slowdown
SERVER = OtherProcess(4242, 20 << 30)


def card(bits=IDLE, others=(), busy=0, temperature_c=41):
    reading = ClockReading(sm_mhz=345, throttle_bits=bits, temperature_c=temperature_c)
    return CardState(reading=reading, others=others, busy_percent=busy)


@pytest.mark.parametrize(
    ("state", "trouble", "refused"),
    [
        pytest.param(card(), None, None, id="idle"),
        pytest.param(card(bits=0), None, None, id="awake"),
        pytest.param(card(bits=IDLE | SETTING | SYNC | DISPLAY), None, None, id="clocks-that-somebody-set"),
        pytest.param(card(bits=IDLE | CAP), None, None, id="a-power-cap-of-an-idle-card"),
        pytest.param(card(busy=9), None, None, id="a-display"),
        pytest.param(card(others=None), None, None, id="processes-hidden-but-not-busy"),
        pytest.param(card(busy=None), None, None, id="share-hidden-but-nobody-there"),
        pytest.param(card(others=(SERVER,)), "shared with process 4242 with 20.0 GiB; stop that", "shared", id="shared"),
        pytest.param(card(others=(SERVER,) * 9), "20.0 GiB, …; stop that", "shared", id="shared-with-many"),
        pytest.param(card(busy=80), "80% busy, by a process that does not show here", "80% busy", id="busy"),
        pytest.param(card(busy=80, others=None), "80% busy", "80% busy", id="busy-and-hidden"),
        pytest.param(card(bits=CAP), "held down before anything runs on it (power cap at 41 C)", "power cap", id="cap"),
        pytest.param(card(bits=HOT, temperature_c=None), "(hardware thermal slowdown); let it", "thermal", id="hot"),
        pytest.param(card(bits=IDLE | HOT), "hardware thermal slowdown", "thermal", id="hot-and-idle"),
        pytest.param(card(bits=BRAKE), "hardware power brake", "power brake", id="brake"),
        pytest.param(card(bits=None), None, "does not say here whether the GPU is throttled", id="silent"),
        pytest.param(card(others=None, busy=None), None, "does not say here who else computes", id="silent-on-others"),
    ],
)  # fmt: skip
def test_what_is_told_and_what_is_refused(state, trouble, refused):
    found = troubles(state)
    assert (trouble is None) == (found == [])
    assert trouble is None or trouble in found[0]
    reason = why_refused(state)
    assert (refused is None) == (reason is None)
    assert refused is None or refused in reason
    assert all("\n" not in text and text.count(";") == 1 for text in [*found, *([reason] if reason else [])])


def test_everything_that_is_wrong_is_told():
    assert len(troubles(card(others=(SERVER,), bits=HOT))) == 2


class Nvml:
    """Answers with one state after the other, the last one for ever."""

    def __init__(self, *states):
        self.states, self.pauses = list(states), []

    def now(self):
        return self.states[0]

    def read(self):
        return self.now().reading

    def others(self):
        return self.now().others

    def busy_percent(self):
        return self.now().busy_percent

    def pause(self, seconds):
        self.pauses.append(seconds)
        if len(self.states) > 1:
            self.states.pop(0)


def test_an_idle_gpu_is_looked_at_once_and_one_that_was_just_busy_is_waited_for():
    idle, ended, server = Nvml(card()), Nvml(card(busy=90), card(busy=2)), Nvml(card(busy=90))
    assert card_state(idle, idle.pause) == card()
    assert idle.pauses == []
    assert card_state(ended, ended.pause) == card(busy=2)
    assert len(ended.pauses) == 1
    assert card_state(server, server.pause) == card(busy=90)
    assert len(server.pauses) == LOOKS - 1
