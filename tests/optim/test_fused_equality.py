"""Format "fp32" takes the very steps of torch's fused AdamW and Adam."""

from __future__ import annotations

import itertools

import pytest
import torch

from mt_lightning.optim.compressed_adamw import CompressedAdamW
from mt_lightning.optim.packed.records import FP32
from mt_lightning.optim.packed.update import adamw_step, decode
from tests.optim.packed_cases import fresh, same, scalars, wild

CLASSES = {True: torch.optim.AdamW, False: torch.optim.Adam}


def _compare(numel: int, num_steps: int, decoupled: bool, **settings) -> None:
    param = torch.nn.Parameter(wild(numel, 1))
    flat, records = param.detach().clone(), fresh(FP32, numel)
    optimizer = CLASSES[decoupled]([param], fused=True, **settings)
    for step in range(1, num_steps + 1):
        grad = wild(numel, 100 + step)
        param.grad = grad.clone()
        optimizer.step()
        constants = scalars(
            step,
            lr=float(settings["lr"]),
            beta1=settings["betas"][0],
            beta2=settings["betas"][1],
            weight_decay=settings["weight_decay"],
            maximize=settings.get("maximize", False),
            decoupled=decoupled,
        )
        adamw_step(FP32, flat, grad, records, constants, key=0)
        assert same(flat, param.detach())
        exp_avg, exp_avg_sq = decode(FP32, records, numel)
        assert same(exp_avg, optimizer.state[param]["exp_avg"])
        assert same(exp_avg_sq, optimizer.state[param]["exp_avg_sq"])


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_a_million_values_are_equal_step_after_step(decoupled: bool) -> None:
    _compare(1 << 20, 5, decoupled, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_every_size_is_equal_to_its_last_element(decoupled: bool) -> None:
    for numel in range(1, 131):
        _compare(numel, 3, decoupled, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("maximize", [True, False], ids=["maximize", "minimize"])
def test_all_settings_are_equal(decoupled: bool, maximize: bool) -> None:
    betas = [(0.9, 0.999), (0.5, 0.9), (0.3, 0.99), (0.0, 0.0)]
    for pair, decay, lr in itertools.product(betas, (0.0, 0.1), (1e-3, torch.tensor(1e-3), 0.0)):
        _compare(1037, 4, decoupled, lr=lr, betas=pair, weight_decay=decay, maximize=maximize)


@pytest.mark.parametrize("format", ["fp32", "lossless"])
def test_nan_and_infinity_go_where_torch_lets_them(format: str) -> None:
    ours = torch.nn.Parameter(wild(1000, 1).view(10, 100))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizers = CompressedAdamW([ours], format=format), torch.optim.AdamW([theirs], fused=True)
    for step in range(6):
        grad = wild(1000, step).view(10, 100)
        if step == 2:
            grad[0, 0], grad[3, 3], grad[9, 99] = torch.nan, torch.inf, -torch.inf
            grad[5, 5] = 3e38
        for param, optimizer in zip((ours, theirs), optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()
        assert same(ours.detach(), theirs.detach())
    assert ours.isnan().sum() >= 2


@pytest.mark.parametrize("format", ["fp32", "lossless"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_a_model_trains_as_with_torch(format: str, decoupled: bool) -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 5)
    ).to(memory_format=torch.channels_last)
    theirs = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 5)
    ).to(memory_format=torch.channels_last)
    theirs.load_state_dict(ours.state_dict())
    pairs = [
        (ours, CompressedAdamW(ours.parameters(), format=format, decoupled_weight_decay=decoupled)),
        (
            theirs,
            CLASSES[decoupled](theirs.parameters(), lr=1e-3, weight_decay=1e-2, fused=True),
        ),
    ]
    for _ in range(5):
        batch = torch.randn(4, 3, 8, 8)
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    for ours_param, theirs_param in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours_param, theirs_param)
