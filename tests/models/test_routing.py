"""``--routing``: what it takes, and traces that anyone may have written."""

from __future__ import annotations

import io
import os
import pickle
import zipfile

import numpy as np
import pytest

from moetune.errors import UsageError
from moetune.models import trace_file
from moetune.models.routing import UNIFORM, Hot, Trace, Zipf, parse_routing, why_not_of
from moetune.models.trace_file import read_trace
from moetune_kernels.shape import MoEShape

SHAPE = MoEShape(hidden=16, inter=16, local_experts=8, top_k=2)
IDS = np.array([[0, 1], [7, 3], [-1, -1], [2, 5]])


@pytest.mark.parametrize(
    ("option", "meant", "text"),
    [
        ("uniform", UNIFORM, "uniform"),
        ("zipf", Zipf(1.1), "zipf:1.1"),
        ("zipf:1.30", Zipf(1.3), "zipf:1.3"),
        ("zipf:2", Zipf(2.0), "zipf:2.0"),
        ("hot", Hot(0.5), "hot:0.5"),
        ("hot:1", Hot(1.0), "hot:1.0"),
    ],
)
def test_a_routing_has_one_spelling_that_is_read_again(option, meant, text):
    assert parse_routing(option) == meant
    assert meant.text == text
    assert parse_routing(meant.option) == meant


def test_near_exponents_are_not_spelled_alike():
    assert Zipf(1.1234567).text != Zipf(1.1234568).text


@pytest.mark.parametrize(
    "option",
    ["", "zip", "Uniform", "uniform:1", "zipf:", "zipf:x", "zipf:nan", "zipf:-1", "zipf:0", "zipf:9", "zipf:1_0",
     "zipf:\u0661", "hot:0", "hot:1.1", "hot:inf", "hot:1:2", "hot:50%", "trace.npy", "x" * 5000],
)  # fmt: skip
def test_anything_else_is_one_sentence_that_says_what_is_taken(option):
    with pytest.raises(UsageError) as caught:
        parse_routing(option)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def saved(tmp_path, name="t.npz", compressed=False, **arrays):
    path = tmp_path / name
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return path


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, ">i4"])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_trace_is_read_and_rows_of_padding_are_left_out(tmp_path, dtype, compressed):
    weights = np.array([[0.5, 0.5], [1.0, 0.0], [np.nan, np.inf], [0.25, 0.75]], dtype=np.float64)
    rows = read_trace(
        saved(tmp_path, compressed=compressed, topk_ids=IDS.astype(dtype), topk_weights=weights, more=IDS)
    )
    assert rows.ids.tolist() == [[0, 1], [7, 3], [2, 5]]
    assert rows.ids.dtype == np.int32
    assert rows.weights is not None
    assert rows.weights.tolist() == [[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]]


def test_columns_first_and_a_trace_without_weights_are_read(tmp_path):
    rows = read_trace(saved(tmp_path, topk_ids=np.asfortranarray(IDS)))
    assert rows.ids.tolist() == [[0, 1], [7, 3], [2, 5]]
    assert rows.weights is None


def test_two_traces_are_one_routing_when_their_bytes_are_equal(tmp_path):
    one, two = (parse_routing(str(saved(tmp_path, name, topk_ids=IDS))) for name in ("a.npz", "b.npz"))
    other = parse_routing(str(saved(tmp_path, "c.npz", topk_ids=IDS[::-1])))
    assert isinstance(one, Trace)
    assert one == two != other
    assert one.text == two.text != other.text
    assert one.text.startswith("trace:")
    assert len(one.text) == len("trace:") + 16
    assert one.path.is_absolute()


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([[0, 8], [1, 2]], "names expert 8, the layer has 8 (0 to 7)"),
        ([[0, 1, 2]], "records top-3 choices, the layer takes top-2"),
        ([[0, -1]], "rows with fewer than 2 experts"),
    ],
)
def test_a_trace_of_another_layer_is_told_apart(tmp_path, ids, said):
    routing = parse_routing(str(saved(tmp_path, topk_ids=np.array(ids))))
    reason = why_not_of(routing, SHAPE)
    assert reason is not None
    assert said in reason
    assert why_not_of(UNIFORM, SHAPE) is None
    assert why_not_of(parse_routing(str(saved(tmp_path, topk_ids=IDS))), SHAPE) is None


def npy(array, version=(1, 0)):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version, allow_pickle=True)
    return stream.getvalue()


def header_only(shape, descr="<i8", fill=b""):
    """An array whose header promises ``shape`` and whose data is ``fill``."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"shape": shape, "fortran_order": False, "descr": descr})
    return stream.getvalue() + fill


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch exploded",))


def zipped(**members):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return stream.getvalue()


GOOD = npy(np.array([[0, 1]]))
HOSTILE = {
    "empty": b"",
    "text": b"0 1\n2 3\n",
    "a pickle": pickle.dumps(Bomb()),
    "a bare npy": GOOD,
    "cut off": zipped(topk_ids=GOOD)[:-30],
    "a broken checksum": zipped(topk_ids=GOOD).replace(b"PK\x01\x02", b"PK\x01\x03", 1),
    "no ids": zipped(weights=GOOD),
    "pickled ids": zipped(topk_ids=npy(np.array([[Bomb(), 1]], dtype=object))),
    "a pickle for an array": zipped(topk_ids=pickle.dumps(Bomb())),
    "floats": zipped(topk_ids=npy(np.array([[0.0, 1.0]]))),
    "booleans": zipped(topk_ids=npy(np.array([[True, False]]))),
    "texts": zipped(topk_ids=npy(np.array([["a", "b"]]))),
    "records": zipped(topk_ids=npy(np.zeros((1, 2), dtype=[("a", "i4"), ("b", "i4")]))),
    "dates": zipped(topk_ids=npy(np.zeros((1, 2), dtype="M8[s]"))),
    "one dimension": zipped(topk_ids=npy(np.arange(4))),
    "three dimensions": zipped(topk_ids=npy(np.zeros((2, 2, 2), dtype=int))),
    "no rows": zipped(topk_ids=npy(np.zeros((0, 2), dtype=int))),
    "no columns": zipped(topk_ids=npy(np.zeros((2, 0), dtype=int))),
    "too many columns": zipped(topk_ids=npy(np.tile(np.arange(17), (2, 1)))),
    "an id below -1": zipped(topk_ids=npy(np.array([[0, -2]]))),
    "an id too high": zipped(topk_ids=npy(np.array([[0, 1024]]))),
    "an unsigned -1": zipped(topk_ids=npy(np.array([[0, 2**64 - 1]], dtype=np.uint64))),
    "an id of 2**32": zipped(topk_ids=npy(np.array([[0, 2**32]]))),
    "an expert twice": zipped(topk_ids=npy(np.array([[0, 1], [3, 3]]))),
    "nothing but padding": zipped(topk_ids=npy(np.array([[-1, -1]]))),
    "rows that are promised": zipped(topk_ids=header_only((1 << 40, 2))),
    "rows beyond the limit": zipped(topk_ids=header_only((1 << 23, 1))),
    "a negative shape": zipped(topk_ids=header_only((-1, 2))),
    "rows that are missing": zipped(topk_ids=header_only((1000, 2), fill=b"\0" * 16)),
    "bytes left over": zipped(topk_ids=header_only((1, 2), fill=b"\0" * 160)),
    "a huge header": zipped(topk_ids=b"\x93NUMPY\x01\x00\xff\xff" + b" " * 0xFFFF),
    "a header that is code": zipped(topk_ids=b"\x93NUMPY\x01\x00\x20\x00" + b"__import__('os').system('true') "[:32]),
    "version 9": zipped(topk_ids=b"\x93NUMPY\x09\x00" + GOOD[8:]),
    "weights of another shape": zipped(topk_ids=GOOD, topk_weights=npy(np.ones((2, 2)))),
    "weights that are whole": zipped(topk_ids=GOOD, topk_weights=npy(np.ones((1, 2), dtype=int))),
    "weights of NaN": zipped(topk_ids=GOOD, topk_weights=npy(np.array([[np.nan, 1.0]]))),
    "weights below zero": zipped(topk_ids=GOOD, topk_weights=npy(np.array([[-0.5, 1.0]]))),
    "infinite weights": zipped(topk_ids=GOOD, topk_weights=npy(np.array([[np.inf, 1.0]]))),
    "too many arrays": zipped(topk_ids=GOOD, **{f"a{n}": GOOD for n in range(70)}),
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_is_no_sound_trace_is_one_sentence(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hostile.npz"
    path.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        parse_routing(str(path))
    said = str(caught.value)
    assert str(path) in said
    assert "\n" not in said
    assert len(said) < 400 + len(str(path))
    assert not (tmp_path / "exploded").exists()


def test_an_array_that_unpacks_to_too_much_is_not_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "bomb.npz"
    path.write_bytes(zipped(topk_ids=b"\0" * (1 << 20)))
    monkeypatch.setattr(trace_file, "MAX_ROWS", 1000)
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(UsageError, match="unpacks to 1,048,576 B"):
        read_trace(path)


def test_a_file_of_too_many_bytes_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "MAX_FILE_BYTES", 10)
    with pytest.raises(UsageError, match="a trace at most 10 B"):
        read_trace(saved(tmp_path, topk_ids=IDS))


@pytest.mark.timeout(20)
def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "folder.npz").mkdir()
    for name, said in (
        ("pipe", "not a regular file"),
        ("folder", "cannot be read|regular"),
        ("none", "cannot be read"),
    ):
        with pytest.raises(UsageError, match=said):
            read_trace(tmp_path / f"{name}.npz")
