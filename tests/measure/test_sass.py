"""Instruction counts of SASS whose loops were counted by hand."""

from __future__ import annotations

import pytest

from moetune.measure import sass
from moetune.measure.compile_messages import frame, unframe
from moetune.measure.compile_worker import one_line


def listing(*lines: str) -> str:
    """Write nvdisasm's text: labels as they are, instructions behind an address."""
    out, address = [], 0
    for line in lines:
        out.append(line if line.startswith(".L") else f"        /*{address:04x}*/   {line} ;")
        address += 0 if line.startswith(".L") else 16
    return "\n".join(out)


END = ("EXIT", ".L_x_9:", "BRA `(.L_x_9)", "NOP", "NOP")
GEMM = (
    "MOV R1, c[0x0][0x28]",
    "@!P5 BRA `(.L_x_0)",
    ".L_x_1:",
    "LDGSTS.E.BYPASS.128 [R90], desc[UR14][R98.64], P6",
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24",
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0",
    "ISETP.LE.AND P5, PT, R22, UR4, PT",
    "@!P5 BRA `(.L_x_1)",
    ".L_x_0:",
    "STG.E.128 desc[UR14][R2.64], R24",
    *END,
)


def test_the_loop_that_multiplies_is_told_from_what_runs_once():
    mix = sass.instruction_mix(listing(*GEMM))
    assert (mix.fixed, mix.loop, mix.tensor) == (4, 5, "HGMMA")  # neither the self-branch nor the padding counts
    assert mix.loop_macs == 2 * 64 * 128 * 16 / 4


def test_an_unrolled_loop_is_counted_per_step():
    mix = sass.instruction_mix(listing(*GEMM))
    assert mix.per_step(64 * 128 * 32 / 4) == 5
    assert mix.per_step(64 * 128 * 16 / 4) == 2  # two steps of 16 in one turn


def test_a_loop_unrolled_away_runs_once():
    straight = [line for line in GEMM if "BRA `(.L_x_1)" not in line]
    mix = sass.instruction_mix(listing(*straight))
    assert (mix.fixed, mix.loop) == (8, 0)


def test_a_persistent_kernel_counts_its_inner_loop():
    text = listing(
        ".L_x_5:", "IADD3 R1, R1, 0x1, RZ", ".L_x_1:", "HMMA.16816.F32.BF16 R16, R24, R8, R16", "@P0 BRA `(.L_x_1)",
        "STG.E.128 desc[UR14][R2.64], R24", "@P1 BRA `(.L_x_5)", *END,
    )  # fmt: skip
    mix = sass.instruction_mix(text)
    assert (mix.fixed, mix.loop, mix.tensor, mix.loop_macs) == (4, 2, "HMMA", 16 * 8 * 16)


def test_a_wait_outside_the_loop_body_neither_counts_nor_makes_a_second_loop():
    text = listing(
        ".L_x_1:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2", "@!P1 BRA `(.L_x_7)", ".L_x_2:",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24", "@P0 BRA `(.L_x_1)", "EXIT",
        ".L_x_7:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2", "@!P1 BRA `(.L_x_7)", "BRA `(.L_x_2)", *END,
    )  # fmt: skip
    mix = sass.instruction_mix(text)
    assert (mix.loop, mix.tensor) == (5, "HGMMA")  # the way back from the wait is one more


@pytest.mark.parametrize(
    "lines",
    [
        [".L_x_1:", "HMMA.16816.F32 R1", "@P0 BRA `(.L_x_1)", ".L_x_2:", "HMMA.16816.F32 R1", "@P0 BRA `(.L_x_2)"],
        ["HMMA.16816.F32 R1", "CALL.REL.NOINC `(.L_x_1)", ".L_x_1:", "RET.REL.NODEC R2"],
        ["BRX R2 -0x100", "HMMA.16816.F32 R1"],
    ],
    ids=["two-multiplying-loops", "a-call", "an-indirect-branch"],
)
def test_code_without_a_single_counted_loop_has_no_counts(lines):
    mix = sass.instruction_mix(listing(*lines, *END))
    assert (mix.fixed, mix.loop, mix.tensor) == (None, None, "HMMA")


def test_tensor_memory_instructions_have_no_size_in_their_name():
    (code, _) = sass.parse(listing("UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8]", "IMMA.16832.S8.S8 R1"))
    assert [(instruction.tensor, instruction.macs) for instruction in code] == [
        ("UTCHMMA", None),
        ("IMMA", 16 * 8 * 32),
    ]


def test_amd_registers_come_from_the_assembly_text():
    text = "    .vgpr_count:     86\n    .vgpr_spill_count: 3\n"
    assert sass.read_amd_resources(text) == (86, 3)
    assert sass.read_amd_resources("nothing") == (0, 0)


def test_a_long_compiler_error_is_reduced_to_the_line_that_tells():
    error = RuntimeError("`ptxas` stderr:\nptxas /tmp/a.ptx, line 9; error : too few registers\n" + "text\n" * 1000)
    assert one_line(error) == "RuntimeError: ptxas /tmp/a.ptx, line 9; error : too few registers"


def test_a_message_cut_in_two_is_read_once_it_is_whole():
    data = frame({"a": 1}) + frame("second")
    buffer = bytearray(data[:-3])
    assert unframe(buffer) == [{"a": 1}]
    buffer += data[-3:]
    assert unframe(buffer) == ["second"]
