"""A gradient that is not finite spoils weights as in torch, and never a record."""

from __future__ import annotations

import pytest
import torch

from tests.optim.packed_cases import PACKED, adamw_step, by_name, decode, fresh, scalars


def _stepped(format, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    param, records = torch.linspace(-1, 1, numel), fresh(format, numel)
    for step in (1, 2):
        adamw_step(format, param, torch.linspace(1, 2, numel), records, scalars(step), key=step)
    return param, records


@pytest.mark.parametrize("format", PACKED, ids=by_name)
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("position", [0, 300, 400])
def test_only_the_record_of_the_block_is_left_as_it_was(format, value, position: int) -> None:
    numel = 128 * 3 + 40
    param, records = _stepped(format, numel)
    before, clean_records = records.clone(), records.clone()
    clean = param.clone()
    grad = torch.linspace(1, 2, numel)
    adamw_step(format, clean, grad, clean_records, scalars(3), key=3)
    grad[position] = value
    adamw_step(format, param, grad, records, scalars(3), key=3)
    block, size = position // 128, format.record_bytes
    for row in range(4):
        stretch = slice(row * size, (row + 1) * size)
        assert torch.equal(records[stretch], (before if row == block else clean_records)[stretch])
    others = torch.arange(numel) != position
    assert torch.equal(param[others], clean[others])
    # Infinity over infinity is NaN; a finite gradient whose square is infinite moves nothing.
    assert param[position].isfinite() == (value == 3e38)


@pytest.mark.parametrize("format", PACKED, ids=by_name)
def test_training_goes_on_after_a_bad_gradient(format) -> None:
    param, records = _stepped(format, 256)
    grad = torch.ones(256)
    grad[7] = torch.inf
    adamw_step(format, param, grad, records, scalars(3), key=3)
    for step in range(4, 8):
        adamw_step(format, param, torch.ones(256), records, scalars(step), key=step)
    exp_avg, exp_avg_sq = decode(format, records, 256)
    assert exp_avg.isfinite().all()
    assert exp_avg_sq.isfinite().all()
    assert param.isnan().sum() == 1
