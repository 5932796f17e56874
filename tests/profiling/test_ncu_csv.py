"""ncu's table is parsed as documented. The logs here are written by hand in the documented form, not recorded."""

from __future__ import annotations

import pytest

from moetune.measure.ncu_csv import parse, unit_scale

HEADER = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC"'
FACTS = '"1234","python3.12","127.0.0.1","{kernel}","1","7","(128, 1, 1)","(132, 1, 1)","0","9.0"'


def log(metrics: dict[str, tuple[str, list[str]]], kernels: list[str], before: str = "") -> str:
    """Write a log: metric -> (unit, value per kernel)."""
    header = ",".join([HEADER, *(f'"{name}"' for name in metrics)])
    units = ",".join(['""'] * 11 + [f'"{unit}"' for unit, _ in metrics.values()])
    lines = []
    for index, kernel in enumerate(kernels):
        values = [f'"{values[index]}"' for _, values in metrics.values()]
        lines.append(",".join([f'"{index}"', FACTS.format(kernel=kernel), *values]))
    return before + "\n".join([header, units, *lines]) + "\n"


def test_thousands_separators_and_the_row_of_units_are_not_taken_for_values():
    text = log({"dram__bytes_read.sum": ("byte", ["352,321,536"]), "gpu__time_duration.sum": ("ns", ["98,304"])}, ["k"])
    (row,) = parse(text)
    assert row.kernel == "k"
    assert row.values == {"dram__bytes_read.sum": 352_321_536.0, "gpu__time_duration.sum": 98_304.0}


def test_a_value_that_ncu_could_not_read_is_left_out_instead_of_counted_as_zero():
    names = ("dram__bytes_read.sum", "lts__t_bytes.sum", "smsp__inst_executed.sum", "sm__cycles_active.avg")
    text = log({name: ("", [value]) for name, value in zip(names, ("nan", "n/a", "", "12"), strict=True)}, ["k"])
    assert parse(text)[0].values == {"sm__cycles_active.avg": 12.0}


def test_messages_before_and_between_the_rows_are_skipped_and_passes_are_read_from_them():
    before = (
        "==PROF== Connected to process 1234 (/usr/bin/python3.12)\n"
        '==PROF== Profiling "route_kernel" - 0: 0%....50%....100% - 1 pass\n'
        '==PROF== Profiling "gate_up_gather_kernel" - 1: 0%....50%....100% - 3 passes\n'
        "==WARNING== Clocks are not controlled, \n"
        "==PROF== Disconnected from process 1234\n"
    )
    text = log({"sm__cycles_active.avg": ("cycle", ["10", "20.5"])}, ["route_kernel", "gate_up_gather_kernel"], before)
    rows = parse(text + "==WARNING== something after\n")
    assert [(row.kernel, row.values["sm__cycles_active.avg"], row.passes) for row in rows] == [
        ("route_kernel", 10.0, 1),
        ("gate_up_gather_kernel", 20.5, 3),
    ]


def test_scaled_units_come_back_in_base_units_because_csv_alone_prints_mbyte():
    text = log({"dram__bytes_read.sum": ("Mbyte", ["1.5"]), "gpu__time_duration.sum": ("usecond", ["2.25"])}, ["k"])
    assert parse(text)[0].values == {"dram__bytes_read.sum": 1.5e6, "gpu__time_duration.sum": 2250.0}


@pytest.mark.parametrize(
    ("unit", "scale"),
    [
        ("", 1.0), ("%", 1.0), ("byte", 1.0), ("Gbyte", 1e9), ("ns", 1.0), ("nsecond", 1.0), ("msecond", 1e6),
        ("second", 1e9), ("hz", 1.0), ("Ghz", 1e9), ("cycle/second", 1.0), ("cycle/nsecond", 1e9),
        ("cycle/usecond", 1e6), ("Gbyte/second", 1e9), ("register/thread", 1.0), ("inst/cycle", 1.0), ("warp", 1.0),
        ("Kinst", 1e3), ("byte/cycle", 1.0),
    ],
)  # fmt: skip
def test_units(unit, scale):
    assert unit_scale(unit) == pytest.approx(scale)


@pytest.mark.parametrize(
    "text",
    ["", "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", '"just","quoted"\n', HEADER + "\n"],
    ids=["nothing", "only-an-error", "another-table", "a-header-alone"],
)
def test_a_log_without_rows_gives_none(text):
    assert parse(text) == []


def test_a_cut_off_row_is_dropped():
    text = log({"sm__cycles_active.avg": ("cycle", ["10", "20"])}, ["a", "b"])
    assert [row.kernel for row in parse(text[: text.rindex(',"20"')] + "\n")] == ["a"]
