"""Masters stay exact from one fit to the next, through commits, checkpoints and evaluations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor

from mt_lightning import ConfigError, PagedCheckpointIO

from .reference import (
    MakeOptimizer,
    Net,
    Reference,
    assert_same,
    fit,
    loader,
    make_net,
    masters_of,
    paged,
    trainer,
)


def adamw(net: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


@functools.cache
def straight(max_steps: int = 5, make: MakeOptimizer = adamw) -> Reference:
    return Reference(make_net(make)).fit(max_steps=max_steps)


FORMS: dict[str, Any] = {"raw": False, "lossless": "lossless", "packed": "R1"}


class StopError(Exception):
    pass


class Stopping(Net):
    """Ends in an error when a step begins."""

    stop = -1

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if len(self.losses) == self.stop:
            raise StopError
        return super().training_step(batch, batch_idx)


def stopping(stop: int) -> Stopping:
    net = Stopping(adamw)
    net.load_state_dict(make_net(adamw).state_dict())
    net.stop = stop
    return net


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_goes_on_with_its_masters(tmp_path: Path, form: str) -> None:
    paging = {"durability": "step", "optimizer_compression": FORMS[form]}
    whole = make_net(adamw)
    expected = fit(whole, paged(offload_dir=tmp_path / "whole", **paging)).optimizers[0]
    first = stopping(3)
    strategy = paged(offload_dir=tmp_path / "run", **paging)
    with pytest.raises(StopError):
        fit(first, strategy)
    strategy._close()
    net = Net(adamw)
    again = paged(offload_dir=tmp_path / "run", on_existing="resume", **paging)
    optimizer = fit(net, again).optimizers[0]
    assert len(net.losses) == 2
    assert_equal_masters(masters_of(whole, expected), masters_of(net, optimizer))
    if form != "packed":
        assert_same(straight(), net, optimizer)


def assert_equal_masters(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> None:
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert torch.equal(value, actual[name]), name


FORMATS = ("lightning", "linked")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("form", "format"),
    [
        (form, format) if (i + j) % 2 == 0 else slow(form, format)
        for i, form in enumerate(FORMS)
        for j, format in enumerate(FORMATS)
    ],
)
def test_a_checkpoint_holds_the_masters(tmp_path: Path, format: Any, form: str) -> None:
    paging = {"durability": "step", "optimizer_compression": FORMS[form]}
    whole = make_net(adamw)
    expected = fit(whole, paged(**paging)).optimizers[0]
    saves = PagedCheckpointIO(format=format)
    path = tmp_path / "half.ckpt"
    directory = tmp_path / "run"
    half = fit(
        make_net(adamw), paged(offload_dir=directory, **paging), max_steps=3, plugins=[saves]
    )
    half.save_checkpoint(path)
    net = Net(adamw)
    optimizer = fit(net, paged(**paging), ckpt_path=path).optimizers[0]
    assert_equal_masters(masters_of(whole, expected), masters_of(net, optimizer))
    loaded = PagedCheckpointIO().load_checkpoint(path)
    assert loaded["state_dict"]["head.weight"].dtype == torch.bfloat16


class Weights:
    """Makes optimizers without momentum, so that a second fit depends on the masters alone."""

    def __call__(self, net: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=1e-2)


sgd = Weights()


def two_fits(between: Callable[[Any, Net], None], compression: Any = False) -> tuple[Net, Any]:
    net = make_net(sgd, dropout=False)  # a second fit draws other numbers before its first batch
    strategy = paged(durability="step", optimizer_compression=compression)
    made = fit(net, strategy, max_steps=-1, max_epochs=1)
    between(made, net)
    seed_everything(1)
    made.fit_loop.max_epochs = 2
    made.fit(net, loader())
    assert made.global_step == 2 * len(loader())
    return net, made.optimizers[0]


@functools.cache
def after_two_fits() -> dict[str, Tensor]:
    reference = Reference(make_net(sgd, dropout=False)).fit(max_steps=len(loader()))
    configured = reference.masters.configure_optimizers()
    reference.optimizer = configured["optimizer"]
    reference.scheduler = configured["lr_scheduler"]["scheduler"]
    reference.fit(max_steps=len(loader()))
    return {n: p.detach() for n, p in reference.masters.named_parameters() if p.numel()}


BETWEEN: dict[str, Callable[[Any, Net], None]] = {
    "nothing": lambda made, net: None,
    "a prediction": lambda made, net: made.predict(net, loader(), return_predictions=False),
    "a state dict": lambda made, net: [v.sum() for v in net.state_dict().values()],
}


@pytest.mark.parametrize(
    ("between", "compression"),
    [
        (between, compression) if (i + j) % 2 == 0 else slow(between, compression)
        for i, between in enumerate(BETWEEN)
        for j, compression in enumerate((False, "lossless"))
    ],
)
def test_a_second_fit_goes_on_with_the_masters(between: str, compression: Any) -> None:
    net, optimizer = two_fits(BETWEEN[between], compression)
    assert_equal_masters(after_two_fits(), masters_of(net, optimizer))


def test_an_evaluation_before_fit_costs_no_bit_of_the_masters() -> None:
    net = make_net(adamw)
    made = trainer(paged(durability="step"))
    made.predict(net, loader(), return_predictions=False)
    assert net.head.weight.dtype == torch.bfloat16
    torch.manual_seed(1)
    made.fit(net, loader())
    assert_same(straight(), net, made.optimizers[0])


def test_a_new_strategy_begins_with_the_bfloat16_weights() -> None:
    net = make_net(sgd)
    fit(net, paged(durability="step"), max_steps=3)
    weights = {n: p.detach().clone() for n, p in net.named_parameters()}
    made = fit(net, paged(durability="step"), max_steps=0)
    made.predict(net, loader(), return_predictions=False)
    for name, param in net.named_parameters():
        assert torch.equal(param, weights[name]), name


def test_weights_that_come_in_bfloat16_have_masters_too() -> None:
    net = make_net(adamw)
    for param in net.parameters():
        param.data = param.data.bfloat16()
    other = make_net(adamw)
    for param in other.parameters():
        param.data = param.data.bfloat16().float()
    expected = Reference(other).fit()
    assert_same(expected, net, fit(net, paged(durability="step")).optimizers[0])


def test_frozen_parameters_stay_what_they_were() -> None:
    make: Any = lambda net: torch.optim.AdamW(net.layers[1:].parameters(), lr=1e-2)  # noqa: E731
    net, expected = make_net(make), make_net(make)
    for each in (net, expected):
        for name, param in each.named_parameters():
            param.requires_grad_(name.startswith(("layers.1", "layers.2")))
    reference = Reference(expected).fit()
    fit(net, paged(durability="step"))
    for (name, weight), found in zip(
        reference.net.named_parameters(), net.named_parameters(), strict=True
    ):
        assert torch.equal(weight, found[1]), name


@pytest.mark.parametrize("trains", ["bf16-true", "32-true"])
def test_a_checkpoint_of_another_precision_is_refused_or_read_whole(
    tmp_path: Path, trains: str
) -> None:
    other = {"bf16-true": "32-true", "32-true": "bf16-true"}[trains]
    path = tmp_path / "half.ckpt"
    fit(make_net(adamw), paged(), max_steps=3, precision=other).save_checkpoint(path)
    if trains == "32-true":
        with pytest.raises(ConfigError, match="save_masters"):
            fit(Net(adamw), paged(), ckpt_path=path, precision=trains)
        return
    # fp32 weights are masters.
    saved = PagedCheckpointIO().load_checkpoint(path)["state_dict"]
    net = Net(adamw)
    net.on_train_start = lambda: seen.update(masters_now(net))  # type: ignore[method-assign]
    seen: dict[str, Tensor] = {}
    fit(net, paged(durability="step"), ckpt_path=path, max_steps=4)
    assert_equal_masters({n: v for n, v in saved.items() if v.numel()}, seen)


def masters_now(net: Net) -> dict[str, Tensor]:
    """Join what a running fit shows."""
    optimizer = net.trainer.optimizers[0]
    state = optimizer.state_dict()["state"]
    shown = net.state_dict()
    joined = {}
    for (name, param), rest in zip(
        net.named_parameters(), (state[i]["master_rest"] for i in range(len(state))), strict=True
    ):
        if param.numel():
            bits = shown[name].contiguous().view(torch.int16).to(torch.int32) << 16
            joined[name] = (bits + rest).view(torch.float32)
    return joined
