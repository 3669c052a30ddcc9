"""Packed formats are exact as storage: what was encoded is what is decoded, byte for byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_lightning.errors import ConfigError
from mt_lightning.optim.packed.records import M8V8
from tests.optim.packed_cases import ALL, PACKED, by_name, decode, encode, fresh, same, wild

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
SPECIAL = st.sampled_from(
    [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 2.0**-126 * 6, 3.4e38, -3.4e38, 1.0]
)
OTHERS = st.floats(width=32, min_value=0, max_value=2.0**126)
VALUES = st.lists(st.one_of(FLOATS, SPECIAL), min_size=1, max_size=300)


def _round_trips(format, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, key: int) -> None:
    numel = exp_avg.numel()
    records = fresh(format, numel)
    encode(format, exp_avg, exp_avg_sq, records, key=key)
    once = decode(format, records, numel)
    again = torch.full_like(records, 0xA5)
    encode(format, *once, again, key=key + 1, vectors=records)
    assert torch.equal(again, records)
    twice = decode(format, again, numel)
    assert same(once[0], twice[0])
    assert same(once[1], twice[1])


@pytest.mark.parametrize("format", PACKED, ids=by_name)
@settings(max_examples=150, deadline=None)
@given(values=VALUES, other=OTHERS, key=st.integers(0, 9))
def test_any_values_are_kept_once_they_are_coded(format, values, other, key) -> None:
    exp_avg = torch.tensor(values, dtype=torch.float32)
    exp_avg_sq = exp_avg.abs().roll(1)
    exp_avg_sq[0] = other
    _round_trips(format, exp_avg, exp_avg_sq, key)


@pytest.mark.parametrize("format", PACKED, ids=by_name)
@pytest.mark.parametrize("power", [-149, -140, -130, -126, -124, -120, -60, 0, 60, 125, 127])
def test_every_magnitude_and_one_spike_are_kept(format, power: int) -> None:
    generator = torch.Generator().manual_seed(power + 200)
    exp_avg = (torch.rand(1280, generator=generator) - 0.5).double() * 2.0**power
    exp_avg_sq = torch.rand(1280, generator=generator).double() * 2.0**power
    exp_avg[5::128], exp_avg_sq[9::128] = 2.0**power, 2.0**power
    exp_avg[1280 - 100 :] *= 2.0**-20
    exp_avg_sq[1280 - 100 :] *= 2.0**-20
    _round_trips(format, exp_avg.float(), exp_avg_sq.float(), 3)


@pytest.mark.parametrize("format", PACKED, ids=by_name)
def test_two_hundred_rounds_change_nothing(format) -> None:
    numel = 100_000
    records = fresh(format, numel)
    encode(format, wild(numel, 1), wild(numel, 2).square(), records)
    first = records.clone()
    for key in range(200):
        encode(format, *decode(format, records, numel), records, key=key, vectors=records)
    assert torch.equal(records, first)


@pytest.mark.parametrize("power", [-110, -60, 0, 125, 126, 127])
def test_every_record_of_m8v8_that_can_arise_is_kept(power: int) -> None:
    generator = torch.Generator().manual_seed(power + 200)
    rows = torch.randint(0, 256, (500, 262), generator=generator).to(torch.uint8)
    rows[:, :128][rows[:, :128] == 128] = 0  # there is no negative zero
    rows[:, 5], rows[:, 128 + 9] = 127, 255  # the largest values have the last codes
    scales = ((1 + torch.rand(500, 1, generator=generator)).double() * 2.0**power).float()
    rows[:, 256:258] = scales.view(torch.uint8)[:, 2:]
    rows[:, 258:] = scales.view(torch.uint8)
    records = rows.flatten()
    exp_avg, exp_avg_sq = decode(M8V8, records, 64_000)
    assert exp_avg.isfinite().all()
    for key in range(3):
        again = torch.full_like(records, 0xA5)
        encode(M8V8, exp_avg, exp_avg_sq, again, key=key)
        assert torch.equal(again, records)


def test_fp32_keeps_any_bits() -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (2, 1000), dtype=torch.int64).to(torch.int32)
    exp_avg, exp_avg_sq = bits.view(torch.float32)
    format = ALL[0]
    records = fresh(format, 1000)
    encode(format, exp_avg, exp_avg_sq, records)
    values = torch.stack(decode(format, records, 1000))
    assert format.exact
    assert torch.equal(values.view(torch.int32), bits)


@pytest.mark.parametrize("format", PACKED, ids=by_name)
@pytest.mark.parametrize("moment", [0, 1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -1.0])
def test_what_no_code_stands_for_is_refused(format, moment: int, value: float) -> None:
    if (moment, value) == (0, -1.0):
        return  # a first moment may well be negative
    moments = [torch.ones(300), torch.ones(300)]
    moments[moment][200] = value
    records = fresh(format, 300)
    with pytest.raises(ConfigError, match=f"1 of 3 blocks .*{format.name}"):
        encode(format, *moments, records)
    size = format.record_bytes
    assert records[:size].any()
    assert not records[size : 2 * size].any()
    assert records[2 * size :].any()
