"""``moetune sweep --target`` with the real compiler."""

from __future__ import annotations

import pytest

from moetune.cli import main


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_target_is_compiled_for_and_its_resources_are_printed(capsys, target):
    shape = ["--hidden", "512", "--inter", "256", "--experts", "8", "--top-k", "2"]
    assert main.run(["sweep", *shape, "--target", target, "--tokens", "16", "--budget", "1"]) == 0
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines()[1:]]
    compiled = [line for line in lines if line[-1].isdigit()]
    assert {line[0] for line in compiled} == {"gate_up", "down"}
    for *_, registers, spills, smem_bytes in compiled:
        assert 16 <= int(registers) <= 255
        assert int(spills) >= 0
        assert 0 < int(smem_bytes) <= 232_448
    assert "nothing is timed" in printed.err
