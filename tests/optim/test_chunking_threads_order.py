"""However a tensor is cut, in any order and by any number of threads: the bytes are the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.optim.packed_cases import (
    ALL,
    RECORDS,
    STOCHASTIC,
    adamw_step,
    by_name,
    decode,
    encode,
    fresh,
    scalars,
    wild,
)

NUMEL = 128 * 40 + 77


def _whole(format, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    param, records = wild(NUMEL, 1), fresh(format, NUMEL)
    for step in range(1, num_steps + 1):
        adamw_step(format, param, wild(NUMEL, step), records, scalars(step), key=step, threads=1)
    return param, records


@pytest.mark.parametrize("format", RECORDS, ids=by_name)
@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, 40)), shuffle=st.randoms(use_true_random=False))
def test_pieces_in_any_order_give_the_same_bytes(format, cuts, shuffle) -> None:
    expected_param, expected = _whole(format, 3)
    bounds = [0, *(128 * cut for cut in sorted(cuts)), NUMEL]
    pieces = list(zip(bounds[:-1], bounds[1:], strict=True))
    param, records = wild(NUMEL, 1), fresh(format, NUMEL)
    size = format.record_bytes
    for step in range(1, 4):
        grad = wild(NUMEL, step)
        shuffle.shuffle(pieces)
        for a, b in pieces:
            stored = records[a // 128 * size : -(-b // 128) * size]
            adamw_step(format, param[a:b], grad[a:b], stored, scalars(step), key=step, first=a)
    assert torch.equal(param, expected_param)
    assert torch.equal(records, expected)


@pytest.mark.parametrize("format", ALL, ids=by_name)
@pytest.mark.parametrize("threads", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_any_number_of_threads_gives_the_same_bytes(format, threads: int) -> None:
    numel = (1 << 20) + 130
    results = []
    for count in (1, threads):
        param, records = wild(numel, 1), fresh(format, numel)
        for step in (1, 2):
            adamw_step(
                format, param, wild(numel, step), records, scalars(step), key=step, threads=count
            )
        results.append((param, records, *decode(format, records, numel, threads=count)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("format", STOCHASTIC, ids=by_name)
def test_encoding_in_threads_and_pieces_gives_the_same_bytes(format) -> None:
    numel = (1 << 20) + 130
    exp_avg, exp_avg_sq = wild(numel, 1), wild(numel, 2).square()
    expected, threaded, pieces = (fresh(format, numel) for _ in range(3))
    encode(format, exp_avg, exp_avg_sq, expected, key=7, threads=1)
    encode(format, exp_avg, exp_avg_sq, threaded, key=7, threads=4)
    half = 128 * 4000
    at = half // 128 * format.record_bytes
    encode(format, exp_avg[half:], exp_avg_sq[half:], pieces[at:], key=7, first=half)
    encode(format, exp_avg[:half], exp_avg_sq[:half], pieces[:at], key=7)
    assert torch.equal(threaded, expected)
    assert torch.equal(pieces, expected)


def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    expected = [_whole(format, 4) for format in ALL]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda format: _whole(format, 4), ALL * 4))
    for (param, records), (expected_param, expected_records) in zip(
        found, expected * 4, strict=True
    ):
        assert torch.equal(param, expected_param)
        assert torch.equal(records, expected_records)


@pytest.mark.parametrize("format", STOCHASTIC, ids=by_name)
def test_the_key_and_the_place_decide_how_v_is_rounded(format) -> None:
    def bytes_of(key: int, first: int) -> torch.Tensor:
        records = fresh(format, 1280)
        encode(format, torch.zeros(1280), wild(1280, 1).square(), records, key=key, first=first)
        return records

    assert torch.equal(bytes_of(1, 0), bytes_of(1, 0))
    for key, first in ((2, 0), (1, 128), (1, 1 << 32), (1, 1 << 40)):
        assert not torch.equal(bytes_of(1, 0), bytes_of(key, first))
