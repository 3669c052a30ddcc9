"""A plain loop on pages gives the bits of the same loop without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Optimizer

import mt_lightning as mt
from mt_lightning.errors import BudgetError, StepError

from .loops import adamw, differences, loop, loss_of, make

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": adamw,
    "sgd": lambda net: SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "whole tensors": lambda net: Adafactor(net.parameters(), lr=1e-2),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("room", ["ample", "smallest"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_loop_without_pages(name: str, room: str) -> None:
    pages: dict[str, Any] = {"_slice_bytes": 4096}
    if room == "smallest":
        net, optimizer = make(OPTIMIZERS[name])
        with pytest.raises(BudgetError) as caught:
            mt.page(net, optimizer, max_ram_gb=1e-6, _slice_bytes=4096)
        assert caught.value.smallest_gb is not None
        pages["max_ram_gb"] = caught.value.smallest_gb
    expected, _ = loop(OPTIMIZERS[name])
    actual, _ = loop(OPTIMIZERS[name], pages)
    assert differences(expected, actual) == []


@pytest.mark.parametrize("pages", [{"optimizer_compression": "lossless"}, {"durability": "step"}])
def test_no_setting_changes_a_bit(pages: dict[str, Any]) -> None:
    expected, _ = loop(max_norm=None)
    assert differences(expected, loop(pages=pages, max_norm=None)[0]) == []


def test_a_closure_and_clipping_by_value_are_those_of_the_plain_loop() -> None:
    def train(paged: bool) -> list[Any]:
        net, optimizer = make()
        handle = mt.page(net, optimizer) if paged else None
        seen: list[Any] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net)
            loss.backward()
            nn.utils.clip_grad_value_(list(net.parameters()), 1e-3)
            return loss.detach()

        for _ in range(3):
            seen.append(optimizer.step(closure))
        if handle is not None:
            handle.close()
        return [*seen, *(p.detach().clone() for p in net.parameters())]

    assert differences(train(False), train(True)) == []


def test_two_optimizers_are_clipped_by_one_norm() -> None:
    def train(paged: bool) -> list[Any]:
        net, _ = make()
        params = list(net.parameters())
        optimizers = [SGD(params[::2], lr=0.1, momentum=0.9), SGD(params[1::2], lr=0.2)]
        loose = nn.Linear(1, 1)
        handle = mt.page(net, optimizers) if paged else None
        seen: list[Any] = []
        for step in range(3):
            (loss_of(net, step) + loose(torch.ones(1)).square().sum()).backward()
            seen.append(nn.utils.clip_grad_norm_([*params, *loose.parameters()], 0.1))
            seen += [p.grad.clone() for p in loose.parameters() if p.grad is not None]
            for optimizer in optimizers:
                optimizer.step()
            net.zero_grad()
            loose.zero_grad()
        if handle is not None:
            handle.close()
        return [*seen, *(p.detach().clone() for p in net.parameters())]

    assert differences(train(False), train(True)) == []


def test_a_state_dict_in_the_middle_is_the_plain_one_and_goes_in_again() -> None:
    expected, _ = loop(num_steps=1)
    net, optimizer = make()
    with mt.page(net, optimizer):
        for half in range(2):
            (loss_of(net, half) / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        torch.save([net.state_dict(), optimizer.state_dict()], "saved.pt")
        saved = torch.load("saved.pt", weights_only=True)
        weights = [saved[0][name] for name, _ in net.named_parameters()]
        assert differences(expected[4 : 4 + len(weights)], weights) == []
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        assert differences(weights, [net.state_dict()[n] for n, _ in net.named_parameters()]) == []
    assert differences(weights, [p.detach() for p in net.parameters()]) == []


def test_goes_on_from_the_last_commit_of_its_directory() -> None:
    def train(until: int, **settings: Any) -> list[torch.Tensor]:
        net, optimizer = make()
        with mt.page(net, optimizer, offload_dir="run", **settings) as paged:
            for step in range(paged.num_steps, until):
                optimizer.zero_grad()
                loss_of(net, step).backward()
                optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    train(2)
    resumed = train(4, on_existing="resume")
    assert differences(train(4, on_existing="overwrite"), resumed) == []


def test_an_error_in_the_middle_loses_no_finished_step() -> None:
    expected, _ = loop(num_steps=1, max_norm=None)
    net, optimizer = make()

    def train() -> None:
        with mt.page(net, optimizer):
            for half in range(2):
                (loss_of(net, half) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss_of(net, 2)
            loss.register_hook(lambda grad: grad * (1 // 0))
            loss.backward()

    with pytest.raises(ZeroDivisionError):
        train()
    trained = [p.detach() for p in net.parameters()]
    assert differences(expected[3 : 3 + len(trained)], trained) == []


def test_values_that_are_put_in_place_of_weights_are_taken_in() -> None:
    """`p.data = x`: at once where weights stay in RAM, else when the pages are closed."""

    def train(pages: bool) -> list[torch.Tensor]:
        net, optimizer = make()
        block: Any = net.blocks[0]
        stays, goes = net.embed.weight, block.norm.weight
        seen = []
        for run in range(2):
            handle = mt.page(net, optimizer) if pages else None
            for step in range(2):
                loss_of(net, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                stays.data = torch.full(stays.shape, 0.5 + run + step)
            seen.append(net.state_dict()["embed.weight"].clone())
            goes.data = torch.full(goes.shape, 2.0 + run)
            if handle is not None:
                handle.close()
            seen += [p.detach().clone() for p in net.parameters()]
        return seen

    assert differences(train(pages=False), train(pages=True)) == []


def test_values_of_another_shape_are_refused() -> None:
    net, optimizer = make()
    handle = mt.page(net, optimizer)
    net.embed.weight.data = torch.zeros(33, 16)
    loss_of(net).backward()
    with pytest.raises(StepError, match=r"embed\.weight was given values of shape \(33, 16\)"):
        optimizer.step()
    net.embed.weight.data = torch.zeros(32, 16)
    handle.close()
    assert not net.embed.weight.any()
