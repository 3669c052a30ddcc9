"""fp32 masters in two halves: every bit comes back, and the upper half is the nearest bfloat16."""

from __future__ import annotations

import math

import pytest
import torch

from mt_lightning.optim.masters import REST_DTYPE, join, round_to, split

CHUNK = 1 << 24
WHOLE_RANGE = 1 << 32
NUM_PARTS = 8


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.empty(values.shape, dtype=torch.bfloat16)
    rest = torch.empty(values.shape, dtype=REST_DTYPE)
    split(values, weight, rest)
    return weight, rest


def nearest(values: torch.Tensor) -> torch.Tensor:
    return round_to(torch.empty_like(values, dtype=torch.bfloat16), values)


def patterns(start: int, stop: int, step: int = 1) -> torch.Tensor:
    """Return the floats whose bits, as unsigned numbers, are a range."""
    return torch.arange(start, stop, step).to(torch.int32).view(torch.float32)


def check(values: torch.Tensor) -> None:
    weight, rest = halves(values)
    back = join(weight, rest, torch.empty_like(values))
    real = ~values.isnan()
    assert torch.equal(back.view(torch.int32)[real], values.view(torch.int32)[real])
    assert torch.equal(back.isnan(), values.isnan())
    assert torch.equal(weight.isnan(), values.isnan())
    assert torch.equal(back.signbit(), values.signbit())
    # The nearest one, as torch's, which differs at ties only: those go away from zero.
    torchs = values.bfloat16()
    differs = (weight != torchs) & real
    assert bool((values[differs].view(torch.int32) & 0xFFFF == 0x8000).all())
    assert bool((weight[differs].abs() > torchs[differs].abs()).all())


def test_every_kind_of_number_comes_back() -> None:
    """Every upper half, with the low halves around zero, ties and their neighbours."""
    lows = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF, 0x1234, 0xABCD]
    for low in lows:
        check(patterns(low, WHOLE_RANGE, 1 << 16))


def test_every_low_half_comes_back() -> None:
    for upper in (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x7FFF, 0xBF80, 0xFFFF):
        check(patterns(upper << 16, (upper + 1) << 16))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_all_numbers_come_back(part: int) -> None:
    length = WHOLE_RANGE // NUM_PARTS
    for start in range(part * length, (part + 1) * length, CHUNK):
        check(patterns(start, start + CHUNK))


def test_ties_go_away_from_zero() -> None:
    tie = 1.0 + 2.0**-8  # between 1 and 1 + 2 ** -7
    assert nearest(torch.tensor([tie, -tie])).tolist() == [1.0 + 2.0**-7, -1.0 - 2.0**-7]
    assert torch.tensor(tie).bfloat16().item() == 1.0


def test_special_numbers_are_what_they_were() -> None:
    found = nearest(torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 3.4e38, 1e-45]))
    assert found[:2].tolist() == [math.inf, -math.inf]
    assert math.isnan(found[2].item())
    assert found[3:5].signbit().tolist() == [False, True]
    assert found[5].item() == math.inf
    assert found[6].item() == 0.0


@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 6), (2, 3, 4)])
def test_any_shape_and_strides(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape).t() if len(shape) == 2 else torch.randn(shape)
    weight = torch.empty_strided(values.shape, values.stride(), dtype=torch.bfloat16)
    rest = torch.empty(values.shape, dtype=REST_DTYPE)
    split(values, weight, rest)
    assert torch.equal(join(weight, rest, torch.empty_like(values)), values)
    assert torch.equal(nearest(values), weight)
