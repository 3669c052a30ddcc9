"""Weights written from outside: fp32 gives both halves, bfloat16 a lower half of zero."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mt_lightning as mt
from mt_lightning import ConfigError
from mt_lightning.cli import main

from .reference import Net, Reference, fit, loader, make_net, masters_of, paged, trainer
from .test_life import assert_equal_masters, masters_now, sgd


def begin_again(made: Trainer, net: Net) -> dict[str, Tensor]:
    """Fit once more, and return the masters that it begins with."""
    seen: dict[str, Tensor] = {}
    net.on_train_start = lambda: seen.update(masters_now(net))  # type: ignore[method-assign]
    made.fit_loop.epoch_loop.max_steps = made.global_step + 1
    made.fit(net, loader())
    return seen


def after_three_steps() -> dict[str, Tensor]:
    reference = Reference(make_net(sgd)).fit(max_steps=3)
    return {n: p.detach().clone() for n, p in reference.masters.named_parameters() if p.numel()}


WRITES: dict[str, tuple[str, Callable[[Net], Any]]] = {
    "a whole parameter": ("layers.1.up.weight", lambda net: net.layers[1].up.weight.data.mul_(2)),
    "one element": ("layers.1.norm.bias", lambda net: net.layers[1].norm.bias.data[:1].fill_(3)),
    "another tensor": (
        "head.weight",
        lambda net: setattr(net.head.weight, "data", net.head.weight.data.clone() * 2),
    ),
    "outside of units": ("shift", lambda net: net.shift.data.add_(1)),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_is_written_between_two_fits_has_no_lower_half(what: str) -> None:
    name, write = WRITES[what]
    net = make_net(sgd)
    made = fit(net, paged(durability="step"), max_steps=3)
    write(net)
    written = net.get_parameter(name).detach().float()
    expected = {**after_three_steps(), name: written}
    assert_equal_masters(expected, begin_again(made, net))


def test_loading_fp32_between_two_fits_rounds_as_a_copy_does() -> None:
    net = make_net(sgd)
    made = fit(net, paged(durability="step"), max_steps=3)
    other = Net(sgd).state_dict()
    net.load_state_dict(other)
    expected = {n: v.bfloat16().float() for n, v in other.items() if v.numel()}
    found = begin_again(made, net)
    # What happens to be the same in bfloat16 keeps the lower half it had.
    same = {
        n for n, p in after_three_steps().items() if torch.equal(p.bfloat16(), other[n].bfloat16())
    }
    for name in expected.keys() - same:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("durability", ["step", "checkpoint"])
def test_loading_while_training_sets_both_halves(durability: str, dtype: torch.dtype) -> None:
    values = {n: v.to(dtype) for n, v in Net(sgd).state_dict().items()}

    class Loading(Net):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if self.global_step == 2:
                self.load_state_dict(values)

    net = Loading(sgd)
    net.load_state_dict(make_net(sgd).state_dict())
    optimizer = fit(net, paged(durability=durability)).optimizers[0]
    reference = Reference(make_net(sgd))
    steps, show = iter(range(100)), reference.show

    def shown() -> None:
        if next(steps) == 1:
            with torch.no_grad():
                for name, param in reference.masters.named_parameters():
                    param.copy_(values[name])
        show()

    reference.show = shown  # type: ignore[method-assign]
    reference.fit()
    expected = {n: p.detach() for n, p in reference.masters.named_parameters() if p.numel()}
    assert_equal_masters(expected, masters_of(net, optimizer))
    assert torch.equal(torch.stack(net.losses), torch.stack(reference.net.losses))


def test_a_hook_that_writes_to_what_stays_in_ram_drops_its_lower_half() -> None:
    class Writing(Net):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if self.global_step == 2:
                with torch.no_grad():
                    self.shift.mul_(1.5)

    net = Writing(sgd)
    net.load_state_dict(make_net(sgd).state_dict())
    optimizer = fit(net, paged(durability="step")).optimizers[0]
    reference = Reference(make_net(sgd))
    steps, show = iter(range(100)), reference.show

    def shown() -> None:
        show()
        if next(steps) == 1:
            with torch.no_grad():
                reference.net.shift.mul_(1.5)
                reference.masters.shift.copy_(reference.net.shift)

    reference.show = shown  # type: ignore[method-assign]
    reference.fit()
    assert torch.equal(masters_of(net, optimizer)["shift"], reference.masters.shift.detach())


def test_the_masters_are_written_in_fp32(tmp_path: Path) -> None:
    expected = after_three_steps()
    net = make_net(sgd)
    strategy = paged(durability="step", offload_dir=tmp_path / "run")
    made = fit(net, strategy, max_steps=3)
    mt.save_masters(made, tmp_path / "now.safetensors")
    made.save_checkpoint(tmp_path / "last.ckpt")
    assert main(["export", str(tmp_path / "last.ckpt"), str(tmp_path / "b.safetensors")]) == 0
    command = ["export", str(tmp_path / "last.ckpt"), str(tmp_path / "a.safetensors"), "--masters"]
    assert main(command) == 0
    for file in ("now.safetensors", "a.safetensors"):
        found = load_file(tmp_path / file)
        assert_equal_masters(expected, {n: v for n, v in found.items() if v.numel()})
    halves = load_file(tmp_path / "b.safetensors")
    assert {value.dtype for value in halves.values()} == {torch.bfloat16}


def test_masters_are_written_while_training(tmp_path: Path) -> None:
    class Saving(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            mt.save_masters(self.trainer, tmp_path / f"{self.global_step}.safetensors")

    net = Saving(sgd)
    net.load_state_dict(make_net(sgd).state_dict())
    fit(net, paged(durability="checkpoint"), max_steps=4)
    found = load_file(tmp_path / "3.safetensors")
    assert_equal_masters(after_three_steps(), {n: v for n, v in found.items() if v.numel()})


def test_no_masters_are_written_where_there_are_none(tmp_path: Path) -> None:
    made = fit(make_net(sgd), paged(), max_steps=1, precision="32-true")
    with pytest.raises(ConfigError, match="bf16-true"):
        mt.save_masters(made, tmp_path / "masters.safetensors")


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_other_precisions_are_refused_by_name(precision: Any) -> None:
    with pytest.raises(ConfigError, match=f"{precision}.*bf16-mixed"):
        fit(make_net(sgd), paged(), precision=precision)


def test_parameters_of_other_dtypes_are_refused_by_name() -> None:
    net = make_net(sgd)
    net.layers[0].up.weight.data = net.layers[0].up.weight.data.half()
    with pytest.raises(ConfigError, match=r"layers\.0\.up\.weight.*float16"):
        fit(net, paged())
    assert net.head.weight.dtype == torch.float32


def test_bfloat16_weights_without_masters_are_told(caplog: pytest.LogCaptureFixture) -> None:
    net = make_net(sgd)
    fit(net.bfloat16(), paged(), max_steps=1, precision="32-true")  # type: ignore[arg-type]
    assert "precision='bf16-true' to keep fp32 masters" in caplog.text


class Even(nn.Linear):
    """Initialises itself without random numbers."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-1, 1, self.weight.numel()).view_as(self.weight))
            self.bias.copy_(torch.linspace(0, 1, self.bias.numel()))


class Born(LightningModule):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.ModuleList([Even(64, 64, dtype=dtype) for _ in range(3)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_born_from_meta_have_the_masters_they_were_built_for(dtype: torch.dtype) -> None:
    module, plain = Born(dtype), Even(64, 64, dtype=dtype)
    made = trainer(paged(), max_steps=1)
    made.fit(module, DataLoader(torch.randn(4, 64), batch_size=2))  # type: ignore[arg-type]
    rests = made.strategy.engine.master_rests()  # type: ignore[attr-defined]
    for name, param in module.named_parameters():
        bits = (param.detach().view(torch.int16).to(torch.int32) << 16) + rests[name]
        expected = plain.get_parameter(name.rpartition(".")[2]).float()
        assert torch.equal(bits.view(torch.float32), expected), name
