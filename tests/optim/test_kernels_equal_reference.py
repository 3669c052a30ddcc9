"""The compiled kernels and the slow reference agree bit for bit."""

from __future__ import annotations

import pytest
import torch

from mt_lightning.optim.packed import random, reference, update
from mt_lightning.optim.packed.records import FP32, R1
from mt_lightning.optim.packed.update import fuses_like_torch
from tests.optim.packed_cases import (
    ALL,
    PACKED,
    RECORDS,
    STOCHASTIC,
    adamw_step,
    by_name,
    decode,
    encode,
    fresh,
    reference_decode,
    reference_encode,
    reference_step,
    same,
    scalars,
    wild,
)

SIZES = [1, 127, 128, 129, 1000, 20_000]
FAR = (1 << 33) + 128 * 5
"""An index beyond 32 bits."""


@pytest.mark.parametrize("format", ALL, ids=by_name)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"decoupled": False},
        {"maximize": True, "weight_decay": 0.0},
        {"decoupled": False, "maximize": True, "beta1": 0.3, "eps": 1e-15},
    ],
    ids=["adamw", "adam", "maximize", "adam-maximize"],
)
def test_steps_are_equal(format, numel: int, settings: dict) -> None:
    param = wild(numel, 1)
    twin = param.clone()
    records, twin_records = fresh(format, numel), fresh(format, numel)
    for step in range(1, 8):
        grad = wild(numel, 10 + step)
        key = random.key(3, step, 2)
        constants = scalars(step, **settings)
        first = FAR if format in RECORDS else 1 << 33
        adamw_step(format, param, grad, records, constants, key=key, first=first)
        reference_step(format, twin, grad, twin_records, constants, key=key, first=first)
        assert same(param, twin)
        assert torch.equal(records, twin_records)


@pytest.mark.parametrize("format", PACKED, ids=by_name)
@pytest.mark.parametrize("numel", SIZES)
def test_codes_are_equal(format, numel: int) -> None:
    records, twin = fresh(format, numel) + 255, fresh(format, numel) + 255
    exp_avg, exp_avg_sq = wild(numel, 1), wild(numel, 2).square()
    first = FAR if format in RECORDS else 1 << 33
    encode(format, exp_avg, exp_avg_sq, records, key=99, first=first)
    reference_encode(format, exp_avg, exp_avg_sq, twin, key=99, first=first)
    assert torch.equal(records, twin)
    values = decode(format, records, numel, first=first)
    expected = reference_decode(format, twin, numel, first=first)
    assert same(values[0], expected[0])
    assert same(values[1], expected[1])


@pytest.mark.parametrize("format", PACKED, ids=by_name)
def test_any_bytes_decode_as_the_reference_says(format) -> None:
    generator = torch.Generator().manual_seed(0)
    nbytes = fresh(format, 12_800).numel()
    records = torch.randint(0, 256, (nbytes,), generator=generator)
    records = records.to(torch.uint8)
    if format.name == "R1":  # bytes of three digits end at 215
        records.view(-1, 111)[:, 64:107] %= 216
    values = decode(format, records, 12_800)
    expected = reference_decode(format, records, 12_800)
    assert same(values[0], expected[0])
    assert same(values[1], expected[1])


def test_the_fp32_kernel_is_the_one_that_runs_here() -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch may contract elsewhere on this processor; format fp32 then steps in it")
    assert fuses_like_torch()


def test_where_torch_rounds_otherwise_fp32_steps_in_torch(monkeypatch) -> None:
    expected = wild(1000, 1)
    param, records = expected.clone(), fresh(FP32, 1000)
    exp_avg, exp_avg_sq = torch.zeros(2, 1000)
    monkeypatch.setattr(update, "fuses_like_torch", lambda: False)
    monkeypatch.setattr(update.kernels, "step_fp32", None)
    for step in (1, 2, 3):
        grad = wild(1000, step)
        for a, b in ((512, 1000), (0, 512)):
            stored = records[8 * a :]
            update.adamw_step(FP32, param[a:b], grad[a:b], stored, scalars(step), key=0, first=a)
        reference.fused_step(expected, grad, exp_avg, exp_avg_sq, scalars(step))
    assert torch.equal(param, expected)
    assert torch.equal(decode(FP32, records, 1000)[1], exp_avg_sq)


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("in a kernel")

    monkeypatch.setattr(update.kernels, "step_packed", fail)
    numel = 1 << 20
    with pytest.raises(RuntimeError, match="in a kernel"):
        adamw_step(
            R1,
            wild(numel, 1),
            wild(numel, 2),
            fresh(R1, numel),
            scalars(1),
            key=0,
            threads=4,
        )


def test_keys_differ_in_every_part() -> None:
    keys = {
        random.key(seed, step, tensor)
        for seed in (0, 1, -1, 1 << 32, 1 << 40)
        for step in (0, 1, 2, 1000)
        for tensor in (0, 1, 7)
    }
    assert len(keys) == 60
    assert all(0 <= key < 1 << 32 for key in keys)


def test_draws_are_uniform_and_unlike_for_neighbours() -> None:
    draws = torch.tensor(
        [random.lowbias32(i * random.GOLDEN & 0xFFFFFFFF) >> 16 for i in range(1 << 14)]
    )
    counts = torch.bincount(draws >> 12, minlength=16)
    assert (counts - 1024).abs().max() < 5 * 1024**0.5
    centred = draws.double() - draws.double().mean()
    correlation = (centred[1:] * centred[:-1]).mean() / centred.square().mean()
    assert abs(correlation) < 0.04


@pytest.mark.parametrize("format", STOCHASTIC, ids=by_name)
def test_rounding_of_v_has_no_bias(format) -> None:
    numel = 128 * 2000
    exp_avg_sq = torch.linspace(format.lowest_level, 1, 127).repeat(2000, 1)
    exp_avg_sq = torch.cat([exp_avg_sq, torch.ones(2000, 1)], 1).view(-1)
    if format.name == "m4v4":
        exp_avg_sq = exp_avg_sq.clamp(max=1.0) * 1.5
    records = fresh(format, numel)
    encode(format, torch.zeros(numel), exp_avg_sq, records, key=5)
    _, values = decode(format, records, numel)
    mean, expected = values.view(2000, 128).mean(0), exp_avg_sq.view(2000, 128)[0]
    # The widest gap is three times the value: its deviation is at most 1.5 / sqrt(2000) of it.
    assert ((mean - expected).abs() / expected).max() < 5 * 1.5 / 2000**0.5
    assert ((mean - expected) / expected).mean().abs() < 0.01
