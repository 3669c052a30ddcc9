"""Weights without a gradient stay where they are, and blocks without one stay zero."""

from __future__ import annotations

import pytest
import torch

from mt_lightning.optim.packed.records import M8V8
from tests.optim.packed_cases import ALL, RECORDS, adamw_step, by_name, decode, fresh, scalars


@pytest.mark.parametrize("format", ALL, ids=by_name)
def test_weights_without_gradient_do_not_move(format) -> None:
    numel = 128 * 30
    generator = torch.Generator().manual_seed(0)
    dead = torch.rand(numel, generator=generator) < 0.5
    param = torch.randn(numel, generator=generator)
    before, records = param.clone(), fresh(format, numel)
    for step in range(1, 60):
        grad = torch.randn(numel, generator=generator) * 10.0 ** (step % 5 - 2)
        grad[dead] = 0
        adamw_step(format, param, grad, records, scalars(step, weight_decay=0.0), key=step)
        exp_avg, _ = decode(format, records, numel)
        assert not exp_avg[dead].any()
    assert torch.equal(param[dead], before[dead])
    assert (param[~dead] != before[~dead]).all()


@pytest.mark.parametrize("beta1", [0.5, 0.9, 0.94])
def test_m_of_m8v8_fades_to_zero_where_gradients_end_in_a_live_block(beta1: float) -> None:
    numel = 128 * 4
    generator = torch.Generator().manual_seed(0)
    param, records = torch.zeros(numel), fresh(M8V8, numel)
    for step in range(1, 400):
        grad = torch.randn(numel, generator=generator)
        if step > 30:
            grad[::4] = 0
        adamw_step(M8V8, param, grad, records, scalars(step, beta1=beta1), key=step)
    exp_avg, _ = decode(M8V8, records, numel)
    assert not exp_avg[::4].any()
    assert exp_avg[1::4].all()


@pytest.mark.parametrize("format", ALL, ids=by_name)
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_blocks_without_gradient_stay_zero_bytes(format, decoupled: bool) -> None:
    numel, size = 128 * 4 + 50, format.record_bytes
    param, records = torch.ones(numel), fresh(format, numel)
    grad = torch.zeros(numel)
    grad[130] = 1.0
    for step in range(1, 5):
        constants = scalars(step, decoupled=decoupled, weight_decay=0.1 if decoupled else 0.0)
        adamw_step(format, param, grad, records, constants, key=step)
    rows = records[: 5 * size].view(-1, size)
    assert rows[1].any()
    assert not rows[[0, 2, 3, 4]].any()


@pytest.mark.parametrize("format", ALL, ids=by_name)
def test_decoupled_decay_reaches_weights_without_gradient(format) -> None:
    param, records = torch.ones(200), fresh(format, 200)
    adamw_step(format, param, torch.zeros(200), records, scalars(1, lr=0.5), key=0)
    assert torch.equal(param, torch.full((200,), 0.95))


@pytest.mark.parametrize("format", RECORDS, ids=by_name)
def test_padding_behind_the_end_stays_zero(format) -> None:
    numel = 128 + 30
    param, records = torch.zeros(numel), fresh(format, numel)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 40):
        grad = torch.randn(numel, generator=generator) * 0.7**step
        adamw_step(format, param, grad, records, scalars(step), key=step)
        exp_avg, exp_avg_sq = decode(format, records, 256)
        assert not exp_avg[numel:].any()
        floor = exp_avg_sq[128:].max() * format.lowest_level * 1.01
        assert (exp_avg_sq[numel:] <= (0 if format.exact else floor)).all()
