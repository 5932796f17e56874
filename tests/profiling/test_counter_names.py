"""Every counter that we ask for exists on its chip, and every set needs one pass: asked of CUPTI, without a GPU."""

from __future__ import annotations

import pytest

from moetune.measure.counter_names import LAUNCH, Chip, MetricSet, chip_of, metrics, only_own_units
from moetune.measure.cupti import library
from moetune.measure.cupti.host import HostProfiler
from moetune_kernels.device import TARGETS
from moetune_kernels.shape import WeightFormat


@pytest.fixture(scope="module")
def cupti():
    """The library itself. Not importorskip: these names are worth nothing untested, so without it the tests fail."""
    return library.load()


EVERY_CHIP = pytest.mark.parametrize("chip", Chip, ids=lambda chip: chip.value)
EVERY_FORMAT = pytest.mark.parametrize("weights", WeightFormat, ids=lambda weights: weights.value)
EVERY_SET = pytest.mark.parametrize("chosen", MetricSet, ids=lambda chosen: chosen.value)


def counted(chip, weights, chosen):
    return [name for name in metrics(chip, weights, chosen).values() if name not in LAUNCH.values()]


@EVERY_SET
@EVERY_FORMAT
@EVERY_CHIP
def test_every_counter_exists_on_its_chip_and_one_pass_reads_the_set(cupti, chip, weights, chosen):
    names = counted(chip, weights, chosen)
    with HostProfiler(cupti, chip.value) as host:
        assert [name for name in names if not host.has(name)] == []
        assert host.schedule(names).passes == 1


def test_the_pass_count_is_not_always_one(cupti):
    """The check above can fail: all FLOPs on top of the main set need a second pass on Hopper."""
    both = counted(Chip.GH100, WeightFormat.BF16, MetricSet.MAIN) + counted(
        Chip.GH100, WeightFormat.BF16, MetricSet.TENSOR
    )
    with HostProfiler(cupti, "GH100") as host:
        assert host.schedule(sorted(set(both))).passes > 1


def test_a_wrong_name_is_noticed(cupti):
    with HostProfiler(cupti, "GH100") as host:
        assert host.has("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed")
        assert not host.has("sm__pipe_tensor_cycles_activ.avg.pct_of_peak_sustained_elapsed")
        assert not host.has("dram__bytes_op_read.sum")  # the name on GB202


@EVERY_FORMAT
@EVERY_CHIP
def test_each_chip_can_count_tensor_flops_in_a_profile_and_in_a_sweep(chip, weights):
    flops = {"wgmma_flops", "mma_flops"}
    assert flops & set(metrics(chip, weights, MetricSet.TENSOR))
    crowded = chip is Chip.GB202 and weights.value.startswith("fp8")  # the one set that has no room for them
    assert bool(flops & set(metrics(chip, weights, MetricSet.HEADLINE))) is not crowded


def test_hopper_counts_both_mma_paths_or_small_tiles_would_show_no_flops():
    names = metrics(Chip.GH100, WeightFormat.BF16, MetricSet.HEADLINE)
    assert "hgmma" in names["wgmma_flops"]
    assert "hmma" in names["mma_flops"]


def test_every_nvidia_target_has_names():
    assert {name: chip_of(device.sm) is None for name, device in TARGETS.items()} == dict.fromkeys(TARGETS, False) | {
        "gfx942": True
    }


def test_a_mig_slice_is_not_asked_for_units_it_shares():
    names = only_own_units(metrics(Chip.GH100, WeightFormat.BF16, MetricSet.MAIN))
    assert "issue_active_percent" in names
    assert not [name for name in names.values() if name.startswith(("dram", "lts"))]
