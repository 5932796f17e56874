"""MOETUNE_DEBUG=1: what serves, said once."""

from __future__ import annotations

import logging
from dataclasses import replace

from moetune_kernels import serving_log
from moetune_kernels.lookup import best_plan
from moetune_kernels.serving_log import log_once


def serve(shape, counts, device):
    for tokens in counts:
        log_once(best_plan(shape, tokens, device), shape, tokens)


def test_each_entry_is_named_once_with_table_plan_and_reason(
    folders, put, make_table, shape, h200, monkeypatch, capsys
):
    path = put(folders["user"], make_table())
    monkeypatch.setenv("MOETUNE_DEBUG", "1")
    serve(shape, (16, 17, 16, 8, 1000, 1001), h200)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert f"table {path}, whose entry 16 serves 12 to 19 tokens" in lines[0]
    assert "gate_up gather 16x32x128, 4 warps, prefetch 2" in lines[0]
    assert "entry 8" in lines[1]
    assert "default plan" in lines[2]
    assert all(shape.key in line for line in lines)


def test_an_entry_of_one_token_count_is_not_called_a_range(folders, put, make_table, shape, h200):
    put(folders["user"], make_table((1, 2, 4)))
    said = [best_plan(shape, tokens, h200).why.partition(", ")[2] for tokens in (1, 4)]
    assert said == ["whose entry 1 serves 1 token", "whose entry 4 serves 3 to 8 tokens"]


def test_a_miss_says_what_was_searched_and_what_is_near(folders, put, make_table, shape, h200, monkeypatch, capsys):
    put(folders["shipped"], make_table())
    monkeypatch.setenv("MOETUNE_DEBUG", "1")
    serve(replace(shape, hidden=1024), (16,), h200)
    said = capsys.readouterr().err
    assert "no table nvidia_h200/e8_h1024_i256_k2_bf16" in said
    assert "nearest held: nvidia_h200/e8_h512_i256_k2_bf16" in said


def test_nothing_is_said_or_set_up_unless_asked(folders, shape, h200, capsys):
    serve(shape, (16,), h200)
    assert capsys.readouterr().err == ""
    assert logging.getLogger("moetune").handlers == []


def test_what_is_remembered_is_bounded():
    for number in range(3 * serving_log._MAX_REMEMBERED):
        serving_log.is_first_time(number)
    assert len(serving_log._said) <= serving_log._MAX_REMEMBERED
