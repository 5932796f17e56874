"""Counting launches by CUPTI, against a C library that plays its part by the headers' rules, and against the real one."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
from cupti_c import METRICS, compile_c

from moetune.measure.counter_rights import BUSY, FORBIDDEN
from moetune.measure.cupti import library, structs
from moetune.measure.cupti.host import HostProfiler
from moetune.measure.cupti.library import Cupti, CuptiError

OPENING = [
    "cuptiProfilerInitialize",
    "cuptiDeviceGetChipName",
    "cuptiProfilerGetCounterAvailability",
    "cuptiProfilerHostInitialize",
    "cuptiProfilerHostGetMetricProperties",
    "cuptiProfilerHostConfigAddMetrics",
    "cuptiProfilerHostGetConfigImageSize",
    "cuptiProfilerHostGetConfigImage",
    "cuptiProfilerHostGetNumOfPasses",
    "cuptiRangeProfilerEnable",
    "cuptiRangeProfilerGetCounterDataSize",
]
COUNTING = [
    "cuptiRangeProfilerCounterDataImageInitialize",
    "cuptiRangeProfilerSetConfig",
    "cuptiRangeProfilerStart",
    "cuptiRangeProfilerPushRange",
    "launch",
    "cuptiRangeProfilerPopRange",
    "cuptiRangeProfilerStop",
    "cuptiRangeProfilerDecodeData",
    "cuptiRangeProfilerGetCounterDataInfo",
    "cuptiProfilerHostEvaluateToGpuValues",
]
# What fails in another way: the launch itself, a metric that is not there, a push that is not taken.
OTHERWISE = {"launch", "cuptiProfilerHostGetMetricProperties", "cuptiRangeProfilerPushRange"}
CLOSING = ["cuptiRangeProfilerDisable", "cuptiProfilerHostDeinitialize", "cuptiProfilerDeInitialize"]


def test_a_launch_is_counted_by_the_calls_that_the_headers_ask_for_in_their_order(fake):
    with fake.profiler() as profiler:
        assert list(dict.fromkeys(fake.notes)) == OPENING
        before = len(fake.notes)
        assert profiler.count(lambda: fake.launch(5.0)) == dict(zip(METRICS, (5.0, 10.0, 15.0), strict=True))
        assert fake.notes[before:] == COUNTING
        before = len(fake.notes)
    assert fake.notes[before:] == CLOSING


@pytest.mark.parametrize(
    ("sessions", "configured", "launches"),
    [(0, 4, [1, 1, 1, 1]), (1, 1, [1, 1, 1, 1]), (2, 4, [1, 2, 1, 1])],
    ids=["refuses", "allows", "counts-nothing"],
)
def test_a_session_is_started_again_as_it_is_where_that_works_and_tried_once_where_not(
    fake, sessions, configured, launches
):
    fake.library.fake_sessions(sessions)
    flushes = []
    with fake.profiler() as profiler:
        for size, times in zip((1000.0, 1.0, 7.0, 2.0), launches, strict=True):
            before, flushed = fake.notes.count("launch"), len(flushes)
            values = profiler.count(lambda size=size: fake.launch(size), lambda: flushes.append("flush"))
            assert values["gpu__time_duration.sum"] == size
            assert fake.notes.count("launch") - before == times
            assert len(flushes) - flushed >= times  # cold again where it is launched again
    assert fake.notes.count("cuptiRangeProfilerSetConfig") == configured
    assert fake.notes.count("cuptiRangeProfilerStart") == fake.notes.count("cuptiRangeProfilerStop") + (sessions == 0)
    assert not [line for line in fake.notes if "RULES" in line]


@pytest.mark.parametrize("selects", [0, 1], ids=["pushing-is-nothing", "pushing-selects"])
def test_each_launch_has_its_own_values_and_what_runs_between_is_not_counted(fake, selects):
    fake.rules(selects=selects)
    with fake.profiler() as profiler:
        for size in (1000.0, 1.0, 1000.0, 2.0):
            fake.launch(77.0)  # a flush
            assert not fake.library.fake_is_counting()
            assert profiler.count(lambda size=size: fake.launch(size))["gpu__time_duration.sum"] == size
    assert fake.cupti.seconds["cuptiRangeProfilerDecodeData"] > 0


@pytest.mark.parametrize(
    "name",
    [name for name in OPENING + COUNTING if name not in OTHERWISE],
)
def test_an_error_of_any_call_is_one_sentence_that_names_it_and_all_is_taken_back(fake, name):
    fake.plant(name, 7)
    with pytest.raises(CuptiError) as caught, fake.profiler() as profiler:
        profiler.count(fake.launch)
    assert str(caught.value) == f"{name} returned CUPTI_ERROR_INVALID_OPERATION"
    assert caught.value.code == 7
    notes = fake.notes
    taken_back = {"cuptiProfilerInitialize": CLOSING[2], "cuptiProfilerHostInitialize": CLOSING[1]} | {
        "cuptiRangeProfilerEnable": CLOSING[0]
    }
    for opened, closed in taken_back.items():
        assert notes.count(closed) == (opened in notes and opened != name), (opened, notes)
    started = "cuptiRangeProfilerStart" in notes and name != "cuptiRangeProfilerStart"
    assert ("cuptiRangeProfilerStop" in notes) is started
    assert not fake.library.fake_is_counting() or name == "cuptiRangeProfilerStop"
    if name != "cuptiRangeProfilerStop":
        assert not [line for line in notes if "RULES" in line or "WRONG" in line]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (35, f"{FORBIDDEN} (cuptiRangeProfilerEnable: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES)"),
        (26, f"{BUSY} (cuptiRangeProfilerEnable: CUPTI_ERROR_HARDWARE_BUSY)"),
        (999, "cuptiRangeProfilerEnable returned CUptiResult 999"),
    ],
    ids=["permission", "busy", "unheard-of"],
)
def test_an_error_says_what_it_means_for_the_user(fake, code, says):
    fake.plant("cuptiRangeProfilerEnable", code)
    with pytest.raises(CuptiError) as caught, fake.profiler():
        pass
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"passes": 2}, "the metrics need 2 passes"),
        ({"more": 1}, "counted 2 kernels where one was launched"),
        ({"lost": 3}, "counted 4 kernels where one was launched"),
        ({"submitted": 0}, "wants a kernel repeated"),
        ({"unit": 0.0}, "counted nothing"),
        ({"unit": -1.0}, "sm__cycles_active.avg is negative"),
    ],
    ids=["passes", "two-kernels", "dropped", "not-all-passes", "zeros", "negative"],
)
def test_what_cannot_be_one_launchs_counters_is_refused(fake, rules, says):
    fake.rules(**rules)
    with pytest.raises(CuptiError, match=says), fake.profiler() as profiler:
        profiler.count(fake.launch)
    assert fake.notes[-3:] == CLOSING if "passes" not in rules else fake.notes[-2:] == CLOSING[1:]


@pytest.mark.parametrize("selects", [0, 1], ids=["pushing-is-nothing", "pushing-selects"])
def test_where_no_range_can_be_pushed_the_count_decides_whether_that_matters(fake, selects):
    fake.rules(selects=selects)
    fake.plant("cuptiRangeProfilerPushRange", 7)
    with fake.profiler() as profiler:
        if selects:
            with pytest.raises(CuptiError, match="counted 0 kernels where one was launched"):
                profiler.count(fake.launch)
        else:
            assert profiler.count(fake.launch)[METRICS[0]] == 1.0
    assert "cuptiRangeProfilerPopRange" not in fake.notes
    assert not [line for line in fake.notes if "RULES" in line]


def test_a_launch_that_makes_two_kernels_or_none_is_refused(fake):
    with fake.profiler() as profiler:
        with pytest.raises(CuptiError, match="counted 2 kernels"):
            profiler.count(lambda: (fake.launch(), fake.launch()))
        with pytest.raises(CuptiError, match="counted 0 kernels"):
            profiler.count(lambda: None)


def test_a_launch_that_fails_stops_the_session_and_the_next_one_is_counted(fake):
    def broken():
        raise RuntimeError("CUDA error: misaligned address")

    with fake.profiler() as profiler:
        with pytest.raises(RuntimeError, match="misaligned"):
            profiler.count(broken)
        assert not fake.library.fake_is_counting()
        assert profiler.count(lambda: fake.launch(3.0))[METRICS[0]] == 3.0
    assert not [line for line in fake.notes if "RULES" in line]


def test_a_value_that_is_no_number_is_left_out_as_in_ncus_table(fake):
    with fake.profiler([METRICS[0], "nan__x"]) as profiler:
        assert profiler.count(fake.launch) == {METRICS[0]: 1.0}


def test_the_fake_minds_the_rules(fake):
    """The tests above can fail: the fake sees a wrong size and a wrong order."""
    fake.cupti.call(structs.ProfilerInitialize())
    with pytest.raises(CuptiError):
        fake.cupti.call(structs.RangeStart())
    assert fake.notes[-1].startswith("AGAINST THE RULES")
    params = structs.ProfilerInitialize(structSize=15)
    assert fake.library.cuptiProfilerInitialize(ctypes.byref(params)) != 0


@pytest.mark.parametrize("version", [18, 23])
def test_an_old_library_is_refused_by_its_version(fake, version):
    fake.library.fake_version(version)
    with pytest.raises(
        CuptiError, match=rf"API version {version}: that of CUDA 12.6 Update 2 \(version 24\) or newer is"
    ):
        Cupti(fake.library, Path("/x/libcupti.so.12"))
    fake.library.fake_version(24)
    assert Cupti(fake.library, Path("/x/libcupti.so.12")).version == 24


def test_a_library_without_the_range_profiler_is_refused_by_the_function_that_it_lacks(tmp_path):
    source = "CUptiResult cuptiGetVersion(uint32_t* out) { *out = 130001; return CUPTI_SUCCESS; }"
    bare = compile_c(source, tmp_path, "-shared", "-fPIC", name="bare.so")
    with pytest.raises(CuptiError, match="API version 130001 and has no cupti"):
        library.load(bare)


def test_what_is_no_library_is_one_sentence(tmp_path):
    broken = tmp_path / "libcupti.so.13"
    broken.write_text("not ELF")
    with pytest.raises(CuptiError, match="does not load") as caught:
        library.load(broken)
    assert "\n" not in str(caught.value)


def test_without_any_library_the_sentence_says_where_it_comes_from(monkeypatch):
    monkeypatch.setattr(library, "_candidates", lambda: iter(()))
    assert library.find() is None
    with pytest.raises(CuptiError, match="pip install nvidia-cuda-cupti"):
        library.load()


def test_the_library_that_is_loaded_already_comes_first(monkeypatch, tmp_path):
    """As torch's would be; one that is gone from the disk is not taken."""
    loaded = tmp_path / "with space" / "libcupti.so.13"
    loaded.parent.mkdir()
    loaded.touch()
    maps, line = tmp_path / "maps", "7f0000000000-7f0000001000 r-xp 00000000 08:01 42                 "
    maps.write_text(f"{line}{tmp_path / 'gone' / 'libcupti.so.12'} (deleted)\n{line}[heap]\n{line}{loaded}\n")
    monkeypatch.setattr(library, "_MAPS", maps)
    assert library.find() == loaded
    monkeypatch.setattr(library, "_MAPS", tmp_path / "nothing")
    assert library.find() != loaded


def test_what_this_process_has_loaded_is_read_from_the_system(tmp_path, built_fake):
    copy = tmp_path / "libcupti.so.13"
    copy.write_bytes(built_fake.read_bytes())
    found = in_a_process(
        f"import ctypes, json\nctypes.CDLL({str(copy)!r})\n"
        "from moetune.measure.cupti import library\nprint(json.dumps(str(library.find())))"
    )
    assert found == str(copy)


@pytest.mark.parametrize("place", ["torch", "nvidia", "conda", "toolkit"])
def test_a_library_is_found_beside_torch_in_conda_and_in_the_toolkit(monkeypatch, tmp_path, place):
    site = tmp_path / "site-packages"
    folder = {
        "torch": site / "torch" / "lib",
        "nvidia": site / "nvidia" / "cuda_cupti" / "lib",
        "conda": tmp_path / "env" / "lib",
        "toolkit": tmp_path / "usr" / "local" / "cuda-13.0" / "extras" / "CUPTI" / "lib64",
    }[place]
    folder.mkdir(parents=True)
    (folder / "libcupti.so.13").touch()
    (folder / "libcupti.so.2025.3.1").touch()

    class Torch:
        origin = str(site / "torch" / "__init__.py")

    monkeypatch.setattr(library, "_loaded", lambda: iter(()))
    monkeypatch.setattr(library, "DISTRIBUTIONS", ())
    monkeypatch.setattr(library, "find_spec", lambda name: Torch)
    monkeypatch.setattr(library.sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setattr(library, "_TOOLKITS", (str(tmp_path / "usr/local/cuda*/extras/CUPTI/lib64").lstrip("/"),))
    assert library.find() == folder / "libcupti.so.13"


def in_a_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_real_library_loads_without_a_search_path_and_schedules_for_a_chip_that_is_not_here():
    found = in_a_process(
        "import json, os, sys\n"
        "os.environ.pop('LD_LIBRARY_PATH', None)\n"
        "from moetune.measure.cupti import library\n"
        "from moetune.measure.cupti.host import HostProfiler\n"
        "cupti = library.load()\n"
        "with HostProfiler(cupti, 'GH100') as host:\n"
        "    schedule = host.schedule(['gpu__time_duration.sum', 'dram__bytes_read.sum'])\n"
        "print(json.dumps([cupti.version, schedule.passes, len(schedule.image), 'torch' in sys.modules]))"
    )
    version, passes, size, torch = found
    assert version >= library.OLDEST_VERSION
    assert passes == 1
    assert size > 100
    assert not torch


def test_an_unknown_chip_and_an_unknown_metric_are_one_sentence_of_the_real_library():
    cupti = library.load()
    with pytest.raises(CuptiError, match="this CUPTI is older than the chip"), HostProfiler(cupti, "GX900"):
        pass
    with HostProfiler(cupti, "GH100") as host, pytest.raises(CuptiError, match=r"no metric sm__nothing.sum on a GH100"):
        host.schedule(["sm__nothing.sum"])


def test_without_a_driver_the_real_library_refuses_in_one_sentence():
    """In a process of its own: what the profiler hooks stays hooked."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a driver here")
    said = in_a_process(
        "import json\n"
        "from moetune.measure.cupti import library, ranges\n"
        "try:\n"
        "    with ranges.RangeProfiler(library.load(), None, ['gpu__time_duration.sum']):\n"
        "        print(json.dumps('entered'))\n"
        "except library.CuptiError as error:\n"
        "    print(json.dumps(str(error)))"
    )
    assert "cuptiProfilerInitialize" in said
    assert "\n" not in said
