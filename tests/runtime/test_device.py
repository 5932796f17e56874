"""Devices: their folder names, and which of them may share a table."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from moetune_kernels.device import TARGETS, DeviceInfo
from moetune_kernels.device_match import is_relative, is_same_device
from moetune_kernels.errors import TableError

H200 = TARGETS["sm_90"]
H100 = replace(H200, name="NVIDIA H100 80GB HBM3", memory_bytes=84_942_979_072, l2_bytes=52_428_800)
NAMES = (
    "NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H20", "NVIDIA H20-3e", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe",
    "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "Odd/Name (R)", "Odd_Name (R)", "..", ".", "Ünïcode",
)  # fmt: skip


def test_every_name_has_a_folder_of_its_own_that_any_file_system_takes():
    slugs = {replace(H200, name=name).slug for name in NAMES}
    assert len(slugs) == len(NAMES)
    assert all(re.fullmatch(r"[a-z0-9_%+-][a-z0-9._%+-]*", slug) for slug in slugs)
    assert H200.slug == "nvidia_h200"


def test_a_slice_has_another_folder_than_the_whole_card():
    assert replace(H200, mig="3g.71gb").slug == "nvidia_h200_mig_3g.71gb"


@pytest.mark.parametrize("here", NAMES)
def test_no_name_matches_another_by_its_beginning(here):
    matching = [name for name in NAMES if is_same_device(replace(H200, name=name), replace(H200, name=here))]
    assert matching == [here]


@pytest.mark.parametrize(
    "change",
    [
        {"sm_count": 66},
        {"memory_bytes": H200.memory_bytes // 2},
        {"l2_bytes": 31_457_280},
        {"mig": "3g.71gb"},
        {"sm": 100},
    ],
    ids=str,
)
def test_a_slice_or_a_smaller_card_of_the_same_name_is_another_device(change):
    assert not is_same_device(replace(H200, **change), H200)
    assert not is_same_device(H200, replace(H200, **change))


def test_drivers_that_hold_back_other_amounts_of_memory_are_one_device():
    # Both were read on H200 hosts.
    assert is_same_device(replace(H200, memory_bytes=150_754_820_096), replace(H200, memory_bytes=150_109_880_320))


def test_only_listed_whole_cards_with_equal_limits_are_relatives():
    assert is_relative(H100, H200)
    assert is_relative(H200, H100)
    assert not is_relative(H200, H200)
    for stranger in ("NVIDIA H20", "NVIDIA H200 NVL", "NVIDIA H100 PCIe", "NVIDIA H100", "NVIDIA H800"):
        assert not is_relative(replace(H100, name=stranger), H200)
    for change in ({"mig": "1g.18gb"}, {"smem_limit": 101_376}, {"sm_count": 66}):
        assert not is_relative(H100, replace(H200, **change))
        assert not is_relative(replace(H100, **change), H200)


def test_json_comes_back_as_it_went_out():
    slice_ = replace(H200, mig="3g.71gb")
    assert DeviceInfo.from_json(slice_.to_json()) == slice_


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sm": "90"}, "sm"),
        ({"sm_count": 0}, "sm_count"),
        ({"memory_bytes": 1e11}, "memory_bytes"),
        ({"l2_bytes": 1 << 60}, "l2_bytes"),
        ({"name": ""}, "name"),
        ({"name": "x" * 300}, "name"),
        ({"mig": 3}, "mig"),
        ({"extra": 3}, "exactly"),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused_by_name(change, named):
    with pytest.raises(TableError, match=named):
        DeviceInfo.from_json(H200.to_json() | change)


def test_warps_are_wider_on_amd():
    assert TARGETS["gfx942"].warp_size == 64
    assert H200.warp_size == 32
