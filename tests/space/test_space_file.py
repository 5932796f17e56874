"""The file of ``--space``: what it may say, and the one sentence about everything that it may not."""

from __future__ import annotations

import json
import os

import pytest

from moetune.errors import UsageError
from moetune.space import read_space_file
from moetune.space.limits import NO_CEILING
from moetune.space.space_file import MAX_FILE_BYTES
from moetune_kernels.config import MoEKernelConfig, Role, Structure

CONFIG = {"structure": "gather", "block_m": 16, "block_n": 64, "block_k": 64}


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "space.json"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def config(**changes):
    return MoEKernelConfig(structure=Structure.GATHER, block_m=16, block_n=64, block_k=64, **changes)


def test_axes_are_for_both_gemms(write):
    path = write('{"structure": ["gather"], "block_m": [16, 64], "num_warps": [4], "max_registers": [null, 168]}')
    space = read_space_file(path)
    assert space.name == str(path)
    assert set(space.allowed) == set(Role)
    for allowed in space.allowed.values():
        assert allowed.holds(config())
        assert allowed.holds(config(max_registers=168, prefetch_distance=6))
        assert not allowed.holds(config(num_warps=8))
        assert not allowed.holds(config(max_registers=128))


def test_each_gemm_may_have_its_own_and_one_that_is_missing_is_free(write):
    space = read_space_file(write('{"down": {"num_warps": [8]}}'))
    assert set(space.allowed) == {Role.DOWN}
    assert not space.allowed[Role.DOWN].holds(config())


def test_listed_configs_are_all_that_is_inside_unless_axes_stand_beside_them(write):
    alone = read_space_file(write(json.dumps({"configs": [CONFIG]}))).allowed[Role.DOWN]
    beside = read_space_file(write(json.dumps({"configs": [CONFIG], "num_warps": [8]}))).allowed[Role.DOWN]
    assert (alone.holds(config()), alone.holds(config(num_warps=8))) == (True, False)
    assert (beside.holds(config()), beside.holds(config(num_warps=8)), beside.holds(config(num_warps=2))) == (
        True,
        True,
        False,
    )


def test_a_config_may_be_pasted_from_a_table(write):
    pasted = config(smem_size=98_304).to_json()
    allowed = read_space_file(write(json.dumps({"configs": [pasted]}))).allowed[Role.GATE_UP]
    assert allowed.ceiling(config()) == 98_304
    assert allowed.ceiling(config(num_warps=8)) is None


def test_of_several_ceilings_the_highest_counts(write):
    axes = read_space_file(write('{"smem_size": [76800, 115712]}')).allowed[Role.DOWN]
    free = read_space_file(write('{"smem_size": [76800, null]}')).allowed[Role.DOWN]
    listed = [CONFIG | {"smem_size": size} for size in (115_712, 76_800)]
    configs = read_space_file(write(json.dumps({"configs": listed}))).allowed[Role.DOWN]
    assert (axes.ceiling(config()), free.ceiling(config()), configs.ceiling(config())) == (115_712, NO_CEILING, 115_712)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not valid JSON at line 1 column 1"),
        ('{"block_m": [16,]}', "not valid JSON at line 1 column"),
        ('{"block_m": [16]\n"block_n": [16]}', "line 2 column 1"),
        (b'{"block_m": [\xff]}', "not UTF-8 text at byte 13"),
        ("[]", "must hold a JSON object, got list"),
        ("17", "must hold a JSON object, got int"),
        ("{}", "it names nothing"),
        ('{"down": {}}', "down names nothing"),
        ('{"down": [16]}', "down must be an object of axes, got list"),
        ('{"blok_m": [16]}', "'blok_m' is no axis; the axes are structure, block_m"),
        ('{"down": {"blok_m": [16]}}', "down.'blok_m' is no axis"),
        ('{"split_k": [1]}', "'split_k' is no axis"),
        ('{"block_m": 16}', "block_m must be a list, got int"),
        ('{"block_m": {"16": 1}}', "block_m must be a list, got dict"),
        ('{"block_m": []}', "block_m is empty"),
        ('{"block_m": [16, 48]}', "block_m[1]: block_m must be one of 16, 32, 64, 128, 256, got 48"),
        ('{"gate_up": {"block_m": [16, 48]}}', "gate_up.block_m[1]: block_m must be"),
        ('{"block_m": ["16"]}', "block_m[0]: block_m must be one of"),
        ('{"block_m": [16.0]}', "got 16.0"),
        ('{"block_m": [true]}', "got True"),
        ('{"block_m": [null]}', "got None"),
        ('{"block_m": [NaN]}', "NaN is no JSON number"),
        ('{"num_warps": [-Infinity]}', "-Infinity is no JSON number"),
        ('{"num_warps": [1e999]}', "got inf"),
        ('{"num_warps": [3]}', "num_warps[0]: num_warps must be one of 1, 2, 4, 8, 16, got 3"),
        ('{"prefetch_distance": [9]}', "prefetch_distance must be a whole number from 1 to 8, got 9"),
        ('{"max_registers": [null, 16]}', "max_registers[1]: max_registers must be a whole number from 24 to 255"),
        ('{"smem_size": [0]}', "smem_size[0]: smem_size must be a whole number from 1"),
        ('{"group_m": [65]}', "group_m must be a whole number from 1 to 64"),
        ('{"structure": ["gather", "tma_ws"]}', "structure[1]: structure must be one of gather, tma, tma_permute"),
        ('{"structure": [["gather"]]}', "structure[0]: structure must be one of"),
        ('{"block_m": [16, 64, 16]}', "block_m[2] repeats 16"),
        ('{"max_registers": [null, null]}', "max_registers[1] repeats None"),
        ('{"block_m": [16], "block_m": [64]}', "'block_m' stands twice in one object"),
        ('{"block_m": [16], "down": {"num_warps": [4]}}', "'block_m' is for both GEMMs, 'down' for one"),
        ('{"configs": {}}', "configs must be a list, got dict"),
        ('{"configs": []}', "configs is empty"),
        ('{"configs": [17]}', "configs[0]: a kernel config must be an object, got int"),
        ('{"down": {"configs": [{}]}}', "down.configs[0]: a kernel config has unknown fields [] and lacks"),
        (json.dumps({"configs": [CONFIG, CONFIG | {"num_warps": 5}]}), "configs[1]: num_warps must be one of"),
        (
            json.dumps({"configs": [CONFIG, CONFIG | {"num_stages": 5}]}),
            "configs[1]: a kernel config has unknown fields",
        ),
        (json.dumps({"configs": [CONFIG, CONFIG | {"block_size": 99}]}), "configs[1]: block_size must be"),
        (json.dumps({"configs": [CONFIG, CONFIG | {"num_warps": 4}]}), "configs[1] repeats configs[0]"),
        ('{"block_m": [' + "9" * 5000 + "]}", "a number of thousands of digits"),
        ('{"block_m": [' + "9" * 4000 + "]}", "block_m must be one of"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a' + "x" * 100_000 + '": 1}', "is no axis"),
        (
            json.dumps({"max_registers": list(range(24, 256)), "group_m": list(range(1, 65))}),
            "makes up to",
        ),
        (" " * (MAX_FILE_BYTES + 1), "a space file has at most 1,048,576"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_said_in_one_sentence_with_its_place(write, text, said):
    path = write(text)
    with pytest.raises(UsageError) as caught:
        read_space_file(path)
    message = str(caught.value)
    assert message.startswith(f"--space {path}")
    assert said in message
    assert len(message) < 600
    assert "\n" not in message


@pytest.mark.timeout(10)
def test_only_a_regular_file_is_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, said in ((pipe, "is not a file"), (tmp_path, "is not a file"), (tmp_path / "no", "No such file")):
        with pytest.raises(UsageError, match=said):
            read_space_file(path)
