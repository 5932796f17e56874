"""Bytes from a process that may be broken: whole messages come out, anything else is an error and never a wait."""

from __future__ import annotations

import pickle
import struct

import pytest

from moetune.measure.gpu_messages import MAX_MESSAGE_BYTES, Answer, Inbox, TornMessageError, packed


def test_messages_come_out_whole_however_they_were_cut():
    messages = [Answer(number=number, value="x" * number) for number in (0, 1, 5000)]
    inbox, data, found = Inbox(), b"".join(map(packed, messages)), []
    for place in range(len(data)):
        inbox.add(data[place : place + 1])
        while (message := inbox.take()) is not None:
            found.append(message)
    assert found == messages


@pytest.mark.parametrize(
    "data",
    [
        b"Traceback (most recent call last):",
        struct.pack("<Q", MAX_MESSAGE_BYTES + 1),
        struct.pack("<Q", 7) + b"garbage",
        struct.pack("<Q", 0),
        struct.pack("<Q", 30) + pickle.dumps(Answer(number=1))[:30],
    ],
    ids=["text", "too long", "no pickle", "empty", "half a pickle"],
)
def test_what_is_no_message_is_an_error(data):
    inbox = Inbox()
    inbox.add(data)
    with pytest.raises(TornMessageError):
        inbox.take()
