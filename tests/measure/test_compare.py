"""When one GEMM's output is right: what rounding does passes, what 16-bit sums and single wrong elements do is not."""

from __future__ import annotations

import pytest
import torch

from moetune.measure import compare
from moetune.measure.compare import why_gemm_differs, why_layer_differs
from moetune.measure.guarded import GUARD_ROWS, GuardedRows
from moetune_kernels.shape import WeightFormat

DTYPES = {WeightFormat.BF16: torch.bfloat16, WeightFormat.FP16: torch.float16}
FORMATS = pytest.mark.parametrize("weight_format", DTYPES, ids=lambda value: value.value)
TILE = 64


def product(weight_format, inner=768, rows=64, columns=256):
    """Return x, w and their float32 product, all normal."""
    generator = torch.Generator().manual_seed(inner)
    x = torch.randn(rows, inner, generator=generator).to(DTYPES[weight_format]).float()
    w = (torch.randn(columns, inner, generator=generator) / inner**0.5).to(DTYPES[weight_format]).float()
    return x, w, x @ w.t()


@FORMATS
@pytest.mark.parametrize("inner", [64, 768, 4096])
def test_one_rounding_passes(weight_format, inner):
    *_, want = product(weight_format, inner)
    assert why_gemm_differs(want.to(DTYPES[weight_format]), want, weight_format) is None


@FORMATS
@pytest.mark.parametrize("inner", [768, 4096])
def test_sums_in_16_bits_do_not_pass_however_short(weight_format, inner):
    x, w, want = product(weight_format, inner)
    total = torch.zeros_like(want)
    for start in range(0, inner, TILE):
        part = x[:, start : start + TILE] @ w[:, start : start + TILE].t()
        total = (total + part).to(DTYPES[weight_format]).float()
    assert "relative L2 error" in why_gemm_differs(total.to(DTYPES[weight_format]), want, weight_format)


@FORMATS
def test_an_element_a_tenth_of_its_row_off_is_named_wherever_it_is(weight_format, monkeypatch):
    *_, want = product(weight_format, columns=1024)
    monkeypatch.setattr(compare, "CHUNK", 10 * want.shape[1])  # ten rows at once
    for row, column in ((0, 0), (9, 1023), (10, 3), (63, 128)):
        got = want.to(DTYPES[weight_format])
        got[row, column] = 0.1 + want[row, column] + 0.1 * want[row, column].abs()
        assert f"row {row}, column {column} is" in why_layer_differs(got, want, weight_format)


@FORMATS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_counted(weight_format, value):
    *_, want = product(weight_format)
    got = want.to(DTYPES[weight_format])
    got[5, 7] = got[40, 7] = value
    assert why_gemm_differs(got, want, weight_format) == "2 of 64 rows are not finite, the first is row 5"


@FORMATS
def test_rows_that_should_be_zero_must_be(weight_format):
    *_, want = product(weight_format)
    want[3] = 0.0
    got = want.to(DTYPES[weight_format])
    assert why_layer_differs(got, want, weight_format) is None
    got[3, 3] = 0.001
    assert why_layer_differs(got, want, weight_format) is not None


def test_no_rows_are_right():
    assert why_gemm_differs(torch.empty(0, 8, dtype=torch.bfloat16), torch.empty(0, 8), WeightFormat.BF16) is None


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_guarded_memory_is_nan_aligned_and_tells_where_it_was_written(dtype):
    memory, nothing = GuardedRows((5, 24), dtype, torch.device("cpu")), torch.empty(0, dtype=torch.long)
    assert memory.rows.isnan().all()
    assert memory.rows.storage_offset() * memory.rows.element_size() % 512 == 0
    memory.rows.zero_()
    assert memory.why_written(nothing) is None
    assert memory.why_written(torch.tensor([1, 4])) == "wrote 48 values to rows of slots that are not routed"
    whole = memory.rows.as_strided((5 + 2 * GUARD_ROWS, 24), (24, 1), 0)
    whole[0, 1] = whole[GUARD_ROWS - 1, 0] = whole[-1, -1] = float("nan")  # another NaN than the poison
    assert memory.why_written(nothing) == "wrote 2 values before its first row, wrote 1 values past its last row"
    memory.poison()
    assert memory.why_written(torch.arange(5)) is None
